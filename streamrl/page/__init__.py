"""`streamrl page`: a run to look at in a browser, while it goes on or after its end.

Reads only what a run writes to its folder, and holds no run up: it may look at one that goes on, that crashed, or that
ended years ago. `runs.py` follows folders, `lanes.py` and `logs.py` make of them what the views draw, `server.py` hands
it out, `static/` is what runs in the browser, `bundle.py` makes one file of it.
"""
