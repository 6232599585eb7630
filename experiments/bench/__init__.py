"""How fast the core and the simulator are: `make bench`."""
