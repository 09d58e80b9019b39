"""All private names of torch that the packages use, each behind a function or name that says what it means.

There is a module for each part of torch. These names have no public counterpart. A release that drops one breaks this
folder and no other; ``tests/pipe/test_torch_private.py`` lists the releases that were checked. It also lists
the private attributes of tensors and modules that the packages use directly, since many other libraries rely on them
too.
"""
