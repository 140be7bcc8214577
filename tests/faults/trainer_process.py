"""The trainers of the kit, under the name by which the tests of this folder know them."""

from kit.trainer_process import GONE_WITHIN, STUCK_AFTER, Trainer, becomes_true, run

__all__ = ["GONE_WITHIN", "STUCK_AFTER", "Trainer", "becomes_true", "run"]
