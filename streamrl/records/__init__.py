"""The files in a run's folder: the format of each, and the code that writes and rewinds it.

| file | written by | module |
|---|---|---|
| `config.toml` | launcher | `config` |
| `metrics.jsonl` | controller | `records/metrics.py`: one `StepReport` a line |
| `tensorboard/`, `wandb/` | sinks of the controller | `records/sinks.py` |
| `evaluations.jsonl` | controller | `records/evaluation.py`: one `EvaluationReport` a line |
| `timeline.jsonl` | controller | `records/timeline.py`: one heartbeat or weight update a line |
| `final.json` | controller, launcher | `records/metrics.py`: `Final`, the state of the run at its end, and the reason |
| `checkpoints/*/state/progress.json` | model worker 0 | `records/progress.py`: `Progress`, from which a run resumes |
| `lineages.jsonl` | controller | `records/lineage.py`: one line each time that the run continues from a checkpoint |
| `logs/*.log` | each process | – |

`report/` reads all of it back for people.
"""
