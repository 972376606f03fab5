"""Build hook: compiles dlio's JPEG decoder into the wheel where a C compiler is.

Without one the wheel is pure Python, and libjpeg-turbo decodes all JPEGs. DLIO_BUILD_NATIVE=0
leaves the library out; DLIO_BUILD_NATIVE=1 makes it an error if it cannot be built.
"""

import importlib.util
import os
import sysconfig
import tempfile
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = os.path.join("dlio", "image", "native")


class NativeHook(BuildHookInterface[Any]):
    """Adds the compiled library to a wheel, or compiles it in place for an editable install."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wish = os.environ.get("DLIO_BUILD_NATIVE", "")
        if wish == "0":
            return
        builder = _builder(os.path.join(self.root, _FOLDER, "build.py"))
        is_editable = version == "editable"
        self._scratch = tempfile.TemporaryDirectory(prefix="dlio-wheel-")
        try:
            is_editable = version == "editable"
            path = builder.build(
                os.path.join(self.root, _FOLDER) if is_editable else self._scratch.name
            )
        except (builder.BuildError, OSError) as error:
            if wish == "1":
                raise
            self.app.display_warning(f"JPEGs will be decoded by libjpeg-turbo alone: {error}")
            return
        if not is_editable:
            build_data["force_include"][path] = f"{_FOLDER.replace(os.sep, '/')}/{builder.NAME}"
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"  # ctypes: the same for every Python

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_scratch"):
            self._scratch.cleanup()


def _builder(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("dlio_native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
