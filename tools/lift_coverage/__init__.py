"""How much of what models compute the passes recognise, counted by an oracle that knows nothing of them."""
