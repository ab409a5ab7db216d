"""Kernels are found by module name wherever Python finds the module, without running anything."""

import importlib.util
import sys

from wyfast_lib.ascend import sources


class EditableFinder:
    """What an editable install puts on sys.meta_path: a package whose folder is not on sys.path."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(
            fullname, self.folder / "__init__.py", submodule_search_locations=[str(self.folder)]
        )


def test_a_kernel_of_an_editable_install_is_found_though_its_folder_is_not_on_the_path(tmp_path, monkeypatch):
    folder = tmp_path / "somewhere" / "wyfast_editable_probe"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('nothing is run to find a kernel')\n")
    (folder / "kernels.py").write_text("import triton\n\n\n@triton.jit\ndef copy(x, y):\n    pass\n")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, EditableFinder(folder.name, folder)])
    found = sources.find(f"{folder.name}.kernels:copy")
    assert found.file == str((folder / "kernels.py").resolve()) and found.parameters == ("x", "y")
