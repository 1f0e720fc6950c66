"""Every method that works across the steps of a chunk at matched speed, on the many-step teacher of the street world.

The analogue of the tables of FSC (Frequency-Step Cache): knobs are set on clips that are never tested on, until a
latency model measured once gives every method the same speedup; then all methods and the ablations of FSC run on the
same test clips. Everything is kept in one folder as it is made, so that a later call, or a second process beside the
first, goes on where the work stands.
"""
