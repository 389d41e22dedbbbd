"""XIDs of GPUs: what a plain list per GPU would tell, bounded; bursts begin with the third, and end."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from twin.catalogue import NS, digest, pack, unpack
from twin.diagnosis.xids import OFF_BUS_XID, XID_KEPT, XID_S, XIDS, Xids, codes_of

N = 5
TICK = st.tuples(
    st.floats(1.0, 900.0),
    st.lists(st.tuples(st.integers(0, N - 1), st.sampled_from([13, 79, 31])), max_size=50),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(TICK, max_size=12))
def test_it_tells_what_a_list_for_each_gpu_would(ticks: list[tuple[float, list[tuple[int, int]]]]) -> None:
    xids, plain, now_ns = Xids(N), dict[int, list[tuple[int, int]]](), 10**18
    for step_s, heard in ticks:
        now_ns += round(step_s * NS)
        xids.add(np.array([g for g, _ in heard], np.int32), codes_of(np.array([c for _, c in heard])), now_ns)
        for gpu, code in heard:
            plain[gpu] = [*plain.get(gpu, []), (now_ns, code)][-XID_KEPT:]
        plain = {g: some for g, some in plain.items() if now_ns - some[-1][0] <= XID_S * NS}
        xids.advance(now_ns)
        late = {g: [c for at, c in some if now_ns - at <= XID_S * NS] for g, some in sorted(plain.items())}
        bursts = xids.bursts(None, N)
        assert bursts.tolist() == [g for g, some in late.items() if len(some) >= XIDS]
        assert xids.texts(bursts, now_ns) == [
            f"{len(late[g])} XIDs in 10 min: {', '.join(str(c) for c in sorted(set(late[g])))}"
            for g in bursts.tolist()
        ]
        assert [xids.of(g) for g in range(N)] == [[c for _, c in plain.get(g, [])] for g in range(N)]
        assert xids.fallen().tolist() == [g for g in sorted(plain) if OFF_BUS_XID in xids.of(g)]
        other = Xids(N)
        other.restore(unpack(pack(xids.dump())))
        assert digest(other.dump()) == digest(xids.dump())
        xids = other if len(heard) % 2 else xids


def test_of_more_bursts_than_are_wanted_those_that_last_longest_stay() -> None:
    xids = Xids(N)
    for gpu, at_s in ((3, 1), (0, 2), (4, 2), (1, 3)):
        xids.add(np.full(XIDS, gpu, np.int32), codes_of(np.full(XIDS, 13)), at_s * NS)
        xids.advance(at_s * NS)
    assert xids.bursts(None, 2).tolist() == [0, 3]
    assert xids.bursts(np.arange(N) == 3, 2).tolist() == [0, 4]
    xids.forget("gpu", 0)
    assert xids.bursts(None, 9).tolist() == [1, 3, 4]


def test_absurd_codes_are_one() -> None:
    assert codes_of(np.array([1, -1, 2**31, 2**62])).tolist() == [1, 2**31 - 1, 2**31 - 1, 2**31 - 1]
