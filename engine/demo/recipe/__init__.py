"""How the demo model is made: lessons, corpus, training and evaluation. Needs torch; the package itself does not."""
