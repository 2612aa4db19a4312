"""Data sets: the embedded digits, FashionMNIST, CIFAR-10, image folders and npz files."""

from flatlens.data.datasets import Data, load

__all__ = ["Data", "load"]
