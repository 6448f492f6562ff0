"""KV heads for query heads: copied where there are fewer, themselves where there are as many."""

import torch

from hybridize.ops.types import per_head


def test_heads_are_repeated_in_blocks_or_not_touched():
    x = torch.arange(12.0).view(1, 2, 3, 2)
    torch.testing.assert_close(per_head(x, 6, 2), x.repeat_interleave(2, 2))
    torch.testing.assert_close(per_head(x, 4, 1)[:, [0, 2]], x)
    assert per_head(x, 3, 2) is x
