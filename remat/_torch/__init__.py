"""torch's internals, behind one door: what remat relies on that torch keeps private, a function each.

Read in torch 2.11, 2.13 and 2.15; `tests/test_torch_internals.py` holds each to what it is for. A name that is gone
raises RematError where it is first needed, with its purpose, unless the function says what happens then. No other
module takes a private name of torch, but for those that `tests/test_architecture.py` lists.

training.py   what a planned step runs          dynamo.py    how forwards are captured
recording.py  what fake steps and costs need    inductor.py  how a compiler is steered
"""
