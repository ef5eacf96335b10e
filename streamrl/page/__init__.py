"""`streamrl page`: a run shown in a browser, during the run or after its end.

The page reads only files of the run's folder and never blocks the run: the run may be under way, may have crashed, or
may have ended years ago. `runs.py` follows folders, `lanes.py`, `logs.py` and `answers.py` turn their contents into the
data of the views, `server.py` serves it, `static/` is the part that runs in the browser, and `bundle.py` writes an
overview into a single file.
"""
