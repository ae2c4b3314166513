"""Stage 2: a prefix is attended to where its K/V lie, here in the process or at a pion-server.

held.py    prefixes kept in the process; caches that continue them without a copy
suffix.py  what a cache is whose prefix lies elsewhere; merge.py its mathematics
sparse.py  such a cache over a held prefix: the blocks (blocks.py) that fit a query best
wire.py    such a cache over a prefix at a server; lane.py asks that server
hook.py    the patch of mlx-lm's attention; reach.py whether it reaches a model at all
stage2.py  what a PionPromptCache with stage2 has of all this
"""
