"""Images are built once, layer by layer, and again when what decides them changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.node_programs.image import Image, Layer, archive
from harness.node_programs.oci_archive import Attributes, ImageConfiguration
from tests.node_programs.archives import read_archive

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class CountedLayer:
    """A layer with one file that counts how often it was laid out."""

    def __init__(self, name: str) -> None:
        self.times = 0
        self.layer = Layer(name, (name,), self._lay_out)

    def _lay_out(self, root: Path) -> Attributes:
        self.times += 1
        (root / self.layer.name).write_text(self.layer.name)
        return Attributes()


def image(*layers: Layer, reference: str = "docker.io/tests/program:1") -> Image:
    return Image(reference, layers, ImageConfiguration(entrypoint=("/program",)))


def ignore(_: str) -> None: ...


def test_an_image_is_built_once_and_then_found() -> None:
    layer = CountedLayer("base")
    said: list[str] = []
    first = archive(image(layer.layer), said.append)
    assert said == ["building image docker.io/tests/program:1"]
    assert archive(image(layer.layer), said.append) == first
    assert len(said) == 1
    assert layer.times == 1


def test_two_images_share_the_layer_that_both_have() -> None:
    base, upper = CountedLayer("base"), CountedLayer("upper")
    one = read_archive(archive(image(base.layer), ignore))
    two = read_archive(archive(image(base.layer, upper.layer, reference="docker.io/tests/other:1"), ignore))
    assert two.reference == "docker.io/tests/other:1"
    assert two.layers[0] == one.layers[0]
    assert (base.times, upper.times) == (1, 1)


def test_a_layer_whose_inputs_change_is_built_again_and_no_other() -> None:
    base, upper = CountedLayer("base"), CountedLayer("upper")
    before = archive(image(base.layer, upper.layer), ignore)
    after = archive(image(base.layer, replace(upper.layer, inputs=("changed",))), ignore)
    assert after != before
    assert (base.times, upper.times) == (1, 2)


def test_another_configuration_makes_another_image_of_the_same_layers() -> None:
    base = CountedLayer("base")
    first = image(base.layer)
    second = replace(first, configuration=ImageConfiguration(entrypoint=("/other",)))
    assert archive(first, ignore) != archive(second, ignore)
    assert base.times == 1


def test_a_layer_that_cannot_be_laid_out_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(root: Path) -> Attributes:
        (root / "half").write_text("written")
        raise FileNotFoundError("a program is missing")

    with pytest.raises(FileNotFoundError, match="a program is missing"):
        archive(image(Layer("base", (), fail)), ignore)
    left = [path.name for path in (tmp_path / "kvplace" / "control-plane").iterdir()]
    assert [name for name in left if not name.endswith(".lock")] == []
