"""`streamrl plan`: what a run will do, and which settings would do better, told before it starts.

`calibration` finds out what things cost, from the folder of a run; `simulation` plays a run of any settings with these
costs, on the real ledger and the real routing; `advice` plays the present settings and others, and recommends.
"""
