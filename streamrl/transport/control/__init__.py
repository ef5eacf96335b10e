"""The manager's HTTP API: one module for the messages of each theme, and the client of every other process.

One address, the manager's URL, is enough to join a run.

| call | by | meaning |
|---|---|---|
| POST /register | all | a process joins; refused when its configuration differs |
| POST /place | gserver, rollout | a number for a process that joins a running run |
| POST /drain | anyone | a gserver or rollout worker finishes what it has and leaves |
| POST /leave | gserver, rollout | it has left |
| POST /heartbeat | all | it lives, and how it does; answers whether to stop |
| GET /silent | launcher | waits until others are silent than before the n-th change; who is |
| GET /topology | rollout, master | waits until the named processes are registered; their addresses |
| POST /admit | rollout | waits for room in the ledger; sequence numbers with a gserver for each |
| POST /route | rollout | another gserver for a group whose gserver failed |
| POST /in_flight | rollout | how many requests of its groups still run |
| POST /reject | rollout | a group is given up |
| POST /settle | master | groups that the trainer took or let go of |
| GET /rejections | master | waits for rejections after the n-th |
| POST /evaluate | master | an evaluation is due |
| POST /evaluation/next | evaluator | waits for the next evaluation |
| POST /evaluation/route | evaluator | a gserver for a prompt, another one if that failed |
| POST /evaluation | evaluator | what an evaluation found |
| GET /evaluations | master | waits for reports of evaluations after the n-th |
| GET /data | master | waits until a rollout worker has told the size of the data set |
| POST /publish/begin, /publish/commit | publisher | the two ends of a weight update |
| GET /publish/wanted | master | gservers that came too late for the current weights, which only the trainer has |
| POST /compare | model worker | the gservers that serve a version are to score a response |
| GET /compared | master | what they have scored |
| POST /report | master | the figures of one training step |
| POST /finish_run | master | the run is over; every process is told at its next heartbeat |
| GET /status, /metrics | anyone | the run's state as JSON; figures for Prometheus |
| GET /health | anyone | 200 while the manager lives |
"""

LONG_POLL_SECONDS = 20.0
"""How long the manager holds a waiting call before it answers empty-handed."""
