"""What cpu:1 runs: of 9 stages 1, 3, 5, 7. Each runs when what it takes has arrived."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpipe.runtime import Stage


class Stage1(Stage):
    """Stage 1 of 9: conv1, conv2, conv3, conv4 and 1 more.

        takes    image         f64[4, 3, 63, 63]  from the caller
        borrows  conv1_weight  f64[2, 3, 11, 11]  from stage 0, once a step: conv1.weight
        borrows  conv1_bias    f64[2]             from stage 0, once a step: conv1.bias
        borrows  conv2_weight  f64[6, 2, 5, 5]    from stage 0, once a step: conv2.weight
        borrows  conv2_bias    f64[6]             from stage 0, once a step: conv2.bias
        borrows  conv3_weight  f64[12, 6, 3, 3]   from stage 0, once a step: conv3.weight
        borrows  conv3_bias    f64[12]            from stage 0, once a step: conv3.bias
        borrows  conv4_weight  f64[8, 12, 3, 3]   from stage 0, once a step: conv4.weight
        borrows  conv4_bias    f64[8]             from stage 0, once a step: conv4.bias
        borrows  conv5_weight  f64[8, 8, 3, 3]    from stage 0, once a step: conv5.weight
        borrows  conv5_bias    f64[8]             from stage 0, once a step: conv5.bias
        gives    flatten_1     f64[2, 8]          to stage 2 and stage 3

    15 ops, 0 parameters; forward 93.7 us, backward 186 us, keeps 20.9 kB (estimated, b = 4)
    """

    def forward(
        self,
        image: Tensor,
        conv1_weight: Tensor,
        conv1_bias: Tensor,
        conv2_weight: Tensor,
        conv2_bias: Tensor,
        conv3_weight: Tensor,
        conv3_bias: Tensor,
        conv4_weight: Tensor,
        conv4_bias: Tensor,
        conv5_weight: Tensor,
        conv5_bias: Tensor,
    ) -> Tensor:
        # alexnet.py:29  x = F.max_pool2d(F.relu(self.conv1(image)), 3, stride=2)
        image = image[2:4]
        conv2d_part1 = F.conv2d(image, conv1_weight, conv1_bias, stride=4, padding=2)
        relu_part1 = F.relu(conv2d_part1)
        x_part1 = F.max_pool2d(relu_part1, 3, stride=2)

        # alexnet.py:30  x = F.max_pool2d(F.relu(self.conv2(x)), 3, stride=2)
        conv2d_1 = F.conv2d(x_part1, conv2_weight, conv2_bias, padding=2)
        relu_1 = F.relu(conv2d_1)
        x_1 = F.max_pool2d(relu_1, 3, stride=2)

        # alexnet.py:31  x = F.relu(self.conv3(x))
        conv2d_2 = F.conv2d(x_1, conv3_weight, conv3_bias, padding=1)
        x_2 = F.relu(conv2d_2)

        # alexnet.py:32  x = F.relu(self.conv4(x))
        conv2d_3 = F.conv2d(x_2, conv4_weight, conv4_bias, padding=1)
        x_3 = F.relu(conv2d_3)

        # alexnet.py:33  x = F.max_pool2d(F.relu(self.conv5(x)), 3, stride=2)
        conv2d_4 = F.conv2d(x_3, conv5_weight, conv5_bias, padding=1)
        relu_4 = F.relu(conv2d_4)
        x_4 = F.max_pool2d(relu_4, 3, stride=2)

        # alexnet.py:34  x = F.relu(self.fc6(x.flatten(1)))
        return x_4.flatten(start_dim=1)


class Stage3(Stage):
    """Stage 3 of 9: fc6.

        takes  flatten_0  f64[2, 8]  from stage 0
        takes  flatten_1  f64[2, 8]  from stage 1
        gives  x_5_1      f64[4, 8]  to stage 4 and stage 5

    3 ops, 72 parameters; forward 15.2 us, backward 20.3 us, keeps 512 B (estimated, b = 4)
    """

    states = ("fc6.weight_8_16", "fc6.bias_8_16")
    # parts of the model's tensors: of each the ranges in its dimensions
    parts = (("fc6.weight_8_16", "fc6.weight", ((8, 16),)), ("fc6.bias_8_16", "fc6.bias", ((8, 16),)))

    def forward(self, flatten_0: Tensor, flatten_1: Tensor) -> Tensor:
        # alexnet.py:34  x = F.relu(self.fc6(x.flatten(1)))
        flatten_joined = torch.cat([flatten_0, flatten_1])
        linear_part1 = F.linear(flatten_joined, self.fc6.weight_8_16, self.fc6.bias_8_16)
        x_5_1 = F.relu(linear_part1)
        return x_5_1


class Stage5(Stage):
    """Stage 5 of 9: fc7.

        takes  x_5_0  f64[4, 8]  from stage 2
        takes  x_5_1  f64[4, 8]  from stage 3
        gives  x_6_1  f64[4, 8]  to stage 6 and stage 7

    3 ops, 136 parameters; forward 15.3 us, backward 20.5 us, keeps 768 B (estimated, b = 4)
    """

    states = ("fc7.weight_8_16", "fc7.bias_8_16")
    # parts of the model's tensors: of each the ranges in its dimensions
    parts = (("fc7.weight_8_16", "fc7.weight", ((8, 16),)), ("fc7.bias_8_16", "fc7.bias", ((8, 16),)))

    def forward(self, x_5_0: Tensor, x_5_1: Tensor) -> Tensor:
        # alexnet.py:35  x = F.relu(self.fc7(x))
        x_5_joined = torch.cat([x_5_0, x_5_1], dim=1)
        linear_1 = F.linear(x_5_joined, self.fc7.weight_8_16, self.fc7.bias_8_16)
        x_6_1 = F.relu(linear_1)
        return x_6_1


class Stage7(Stage):
    """Stage 7 of 9: fc8.

        takes  x_6_0       f64[4, 8]  from stage 4
        takes  x_6_1       f64[4, 8]  from stage 5
        gives  linear_2_1  f64[4, 2]  to stage 8

    2 ops, 34 parameters; forward 10.2 us, backward 15.3 us, keeps 512 B (estimated, b = 4)
    """

    states = ("fc8.weight_3_5", "fc8.bias_3_5")
    # parts of the model's tensors: of each the ranges in its dimensions
    parts = (("fc8.weight_3_5", "fc8.weight", ((3, 5),)), ("fc8.bias_3_5", "fc8.bias", ((3, 5),)))

    def forward(self, x_6_0: Tensor, x_6_1: Tensor) -> Tensor:
        # alexnet.py:36  fc8  return self.fc8(x)
        x_6_joined = torch.cat([x_6_0, x_6_1], dim=1)
        linear_2_1 = F.linear(x_6_joined, self.fc8.weight_3_5, self.fc8.bias_3_5)
        return linear_2_1
