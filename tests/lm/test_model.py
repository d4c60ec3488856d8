"""Rows of a pass: parts of one tensor are joined without a copy, others with one."""

import torch

from outrider.lm.model import joined

WHOLE = torch.arange(60.0).view(12, 5)


def test_parts_that_follow_each_other_are_not_copied() -> None:
    parts = torch.split(WHOLE, [3, 0, 1, 4, 4])
    assert torch.equal(joined(parts), WHOLE)
    assert joined(parts).data_ptr() == WHOLE.data_ptr()
    assert torch.equal(joined(parts[2:4]), WHOLE[3:8])
    assert joined(parts[2:4]).data_ptr() == WHOLE[3:].data_ptr()
    assert torch.equal(joined([parts[3]]), WHOLE[4:8])


def test_others_are_put_one_after_the_other() -> None:
    first, second, third = torch.split(WHOLE, 4)
    for parts in ([first, third], [second, first], [first, first], [first, second.clone()], [first.clone(), second]):
        assert torch.equal(joined(parts), torch.cat(parts))
    columns = torch.split(WHOLE[:, 1:3], 6)
    assert torch.equal(joined(columns), torch.cat(columns))
    one, other = torch.arange(4.0).view(2, 2), torch.arange(6.0).view(3, 2)
    assert torch.equal(joined([one, other]), torch.cat([one, other]))
