"""A request across nodes: its acceptor, its placement, what nodes say to each other about it, and its timeline."""
