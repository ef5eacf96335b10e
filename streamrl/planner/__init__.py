"""`streamrl plan`: forecast a run before it starts, and recommend better settings.

`calibration` reads costs from the folder of a run. `simulation` simulates a run with any settings at these costs, with
the real ledger and the real routing. `advice` simulates the present settings and others, and recommends some.
"""
