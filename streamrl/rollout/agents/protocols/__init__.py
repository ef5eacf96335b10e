"""The APIs that agents speak: one module for each, all with the same four functions.

`parse(body)` checks a request and returns a `Call`; `reply(call, completions)` is its answer's body, `events(call,
completions)` the same as server-sent events, and `error(status, kind, message)` the body of an error.
"""
