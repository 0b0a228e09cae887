"""The job of `samplewise check`: builds a model and its inputs from words, verifies, and prints the table with a verdict."""

import importlib
import os
import re
import sys
from contextlib import contextmanager
from collections.abc import Iterator
from typing import Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from samplewise.errors import SamplewiseError
from samplewise.verification import Verification, verify

SIZES = r"\d+(?:x\d+)*"
