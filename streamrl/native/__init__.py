"""What streamrl computes in C on a CPU, and the same in torch.

`operations.py` is the interface: every operation has a twin in torch, which takes over where the C cannot be had.
`build.py` compiles the C. docs/native.md says what each part gains, and how all of it is turned off.
"""
