"""The passes run over a graph, counted and timed, and the forms that a graph takes on the way."""
