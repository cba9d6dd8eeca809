"""From logits to tokens: penalties, draws, and randomness that does not depend on where a request runs."""
