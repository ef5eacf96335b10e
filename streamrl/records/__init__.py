"""What a run leaves in its folder: the format of each file, and what writes and rewinds it.

| file | written by | module |
|---|---|---|
| `config.toml` | launcher | `config` |
| `metrics.jsonl` | controller | `records/metrics.py`: one `StepReport` a line |
| `tensorboard/`, `wandb/` | sinks of the controller | `records/sinks.py` |
| `evaluations.jsonl` | controller | `records/evaluation.py`: one `EvaluationReport` a line |
| `timeline.jsonl` | controller | `records/timeline.py`: one heartbeat or weight update a line |
| `final.json` | controller, launcher | `records/metrics.py`: `Final`, how the run stood at its end, and why it ended |
| `checkpoints/*/state/progress.json` | model worker 0 | `records/progress.py`: `Progress`, what a run resumes from |
| `checkpoints/*/state/taken-up.json` | controller | `records/progress.py`: the run has gone back to this one |
| `logs/*.log` | each process | – |

`report/` reads all of it back for people.
"""
