"""The logger of the package. What it says at INFO is meant to be seen, so it has a handler until the user gives one."""

import logging

log = logging.getLogger("keras_sn")

if not log.handlers and log.level == logging.NOTSET:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("keras_sn: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
