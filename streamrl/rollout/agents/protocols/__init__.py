"""The APIs that agents speak: one module for each, all of them a `common.Api`."""
