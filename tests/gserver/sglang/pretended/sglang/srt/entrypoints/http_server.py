"""The routes of SGLang's server, some of which have no path."""

from types import SimpleNamespace

PATHS = (
    "/generate",
    "/v1/realtime",
    "/update_weights_from_tensor",
    "/load_lora_adapter_from_tensors",
    "/update_weights_from_ipc",
    "/update_weights_from_disk",
    "/health_generate",
    "/health",
)
app = SimpleNamespace(router=SimpleNamespace(routes=[*(SimpleNamespace(path=path) for path in PATHS), object()]))
