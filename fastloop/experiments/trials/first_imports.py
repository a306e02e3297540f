"""The imports that a script begins with: the fork server makes them once, and its trials find them made.

Only the packages listed below are imported ahead: they start no threads and keep no state that trials must not share.
The first import of another package ends the list, because it may set a variable that the next one reads.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

AHEAD = {
    *("torch", "lightning", "pytorch_lightning", "torchmetrics", "torchvision", "torchaudio", "timm", "einops"),
    *("transformers", "tokenizers", "diffusers", "accelerate", "peft", "datasets", "torch_geometric", "monai"),
    *("numpy", "scipy", "pandas", "sklearn", "PIL", "cv2", "albumentations", "matplotlib", "tqdm", "yaml", "omegaconf"),
}
"""Packages that take long to import, and those that scripts usually import before them."""
READ_BY_THEM = (
    "HF_",
    "HUGGINGFACE_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
    "DIFFUSERS_",
    "ACCELERATE_",
    "USE_",
    "OPENCV_",
    "MPL",
)
"""Prefixes of variables that they read as they load."""


def list_first_imports(script: Path) -> list[str]:
    """List the import statements, without those of the standard library, before which a script runs nothing else."""
    try:
        body = ast.parse(script.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    found = []
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # its docstring
            continue
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            break
        tops = {name.partition(".")[0] for name in names}
        if any(script.with_name(f"{top}.py").exists() or script.with_name(top).exists() for top in tops):
            break  # its own
        if tops <= sys.stdlib_module_names:
            continue
        if not tops <= AHEAD | sys.stdlib_module_names:
            break
        found.append(ast.unparse(node))
    return found
