"""Image classifiers under study: ResNet-50 and a small convolutional net.

He et al. 2016 (arXiv:1512.03385), version 1.5; module names are torchvision's, so public
checkpoints fit.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

EXPANSION = 4
RESNET50_BLOCKS = (3, 4, 6, 3)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions added to the input.

    (N, C, H, W) to (N, 4*width, H/stride, W/stride).
    """

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        # Without biases, which the norm behind each convolution would take away again.
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        # Version 1.5 has the stride here, the paper in the first convolution.
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, EXPANSION * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(EXPANSION * width)
        # A shortcut can only be added if it has the output's shape.
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels != EXPANSION * width:
            shortcut = nn.Conv2d(channels, EXPANSION * width, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(EXPANSION * width))

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.bn1(self.conv1(x)))
        y = relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return relu(y + self.downsample(x))


class ResNet50(nn.Module):
    """ResNet-50: images (N, 3, H, W) to logits (N, classes).

    25,557,032 parameters in 161 tensors for 1000 classes.
    """

    def __init__(self, classes: int = 1000):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        channels = 64
        stages = []
        for stage, blocks in enumerate(RESNET50_BLOCKS):
            width = 64 * 2**stage
            layers = []
            for block in range(blocks):
                layers.append(
                    Bottleneck(channels, width, stride=2 if block == 0 and stage > 0 else 1)
                )
                channels = EXPANSION * width
            stages.append(nn.Sequential(*layers))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(channels, classes)
        # As torchvision does.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        # Pooled over the whole image, of any size.
        logits: Tensor = self.fc(torch.flatten(x.mean(dim=(2, 3)), 1))
        return logits


class SmallConvNet(nn.Module):
    """The network of the published CIFAR-100 run: images (N, 3, 32, 32) to logits (N, classes).

    Two 3x3 convolutions of 32 channels, 2x2 max-pooling, dropout, 6272 -> 128, batch norm without
    affine parameters, dropout, 128 -> classes; ReLU after each layer but the last. 825,988
    parameters for 100 classes.
    """

    def __init__(self, classes: int = 100, *, dropout: tuple[float, float] = (0.25, 0.5)):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3)
        self.conv2 = nn.Conv2d(32, 32, 3)
        self.dropout1 = nn.Dropout(dropout[0])
        self.fc1 = nn.Linear(32 * 14 * 14, 128)
        self.bn1 = nn.BatchNorm1d(128, affine=False)
        self.dropout2 = nn.Dropout(dropout[1])
        self.fc2 = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = max_pool2d(relu(self.conv2(relu(self.conv1(x)))), 2)
        x = torch.flatten(self.dropout1(x), 1)
        logits: Tensor = self.fc2(self.dropout2(relu(self.bn1(self.fc1(x)))))
        return logits
