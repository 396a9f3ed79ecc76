// Of the host: preamble.h has what device code takes of it.
