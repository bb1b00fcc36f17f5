"""Plans in the frameworks that people train with: one framework a file, each imported only by who asks for it.

What all of them have to get right is *when*: a plan belongs on the model before anything is put around its forward
(autocast by accelerate, a wrapper by DistributedDataParallel), because the plan was made for the forward itself. The
parameters stay the same objects, so optimizers do not mind.
"""
