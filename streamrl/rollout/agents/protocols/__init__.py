"""The APIs for agents: one module for each, which implements `common.Api`."""
