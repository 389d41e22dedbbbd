"""The command `top`: a site on a terminal, live, for a second screen or a far shell. It only reads."""
