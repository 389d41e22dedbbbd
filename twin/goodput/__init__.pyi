from .goodput import GoodputState as GoodputState, HeldBack as HeldBack, expected_end_ns as expected_end_ns
