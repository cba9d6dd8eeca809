"""How attention is computed: one ragged-batch interface, several backends."""
