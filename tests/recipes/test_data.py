"""Where the recipes' data comes from: made once and always the same, or the user's own, and what is said when not."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import yaml

from fastloop.errors import ConfigError

RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = ("cifar10", "gpt2", "resnet50")
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000a49444154789c6300010000050001" + "0d0a2db40000000049454e44ae426082"
)


@pytest.fixture(scope="module")
def sources(recipe):
    return recipe("_data")


@pytest.fixture(scope="module")
def made(recipe):
    pytest.importorskip("PIL")
    return recipe("_made")


@pytest.fixture(scope="module")
def photographs(made, tmp_path_factory):
    folder = tmp_path_factory.mktemp("photographs")
    made.photographs(folder, train=60, val=20)
    return folder


def pictures(folder: Path, *paths: str) -> Path:
    """Put a one-pixel picture at each of the paths in the folder."""
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(PNG)
    return folder


def digest(folder: Path) -> str:
    """One hash over the names and bytes of all files."""
    total = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        total.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return total.hexdigest()


def test_photographs_weigh_what_real_ones_weigh(photographs):
    from PIL import Image

    files = list(photographs.rglob("*.jpg"))
    assert len(files) == 80
    assert 85_000 < sum(file.stat().st_size for file in files) / len(files) < 130_000
    assert Image.open(files[0]).size == (500, 375)


def test_photographs_made_again_have_the_same_bytes(made, photographs, tmp_path):
    made.photographs(tmp_path, train=60, val=20)
    assert digest(tmp_path) == digest(photographs)


def test_every_class_is_in_both_splits(photographs):
    for split in ("train", "val"):
        assert len(list((photographs / split).iterdir())) == 10
        assert all(any(folder.iterdir()) for folder in (photographs / split).iterdir())


def test_thumbnails_weigh_what_real_ones_weigh_and_are_the_same_again(made, tmp_path):
    first, again = tmp_path / "first", tmp_path / "again"
    made.thumbnails(first, train=100, val=20)
    made.thumbnails(again, train=100, val=20)
    files = list(first.rglob("*.png"))
    assert len(files) == 120
    assert 1_500 < sum(file.stat().st_size for file in files) / len(files) < 3_500
    assert digest(first) == digest(again)


def test_the_text_is_the_same_each_time_and_looks_like_english(made):
    text = made.text()
    assert len(text) == 1_000_000
    assert text == made.text()
    words = text.decode("ascii").lower().split()
    assert words.count("the") > 5 * words.count("another") > 0  # Zipf's law


def test_a_quick_make_draws_no_bar(made, capfd):
    assert list(made._with_bar([1, 2, 3], 3, "counting")) == [1, 2, 3]
    assert capfd.readouterr().err.strip() == ""


def test_publish_makes_once(sources):
    made_in = []
    first = sources.publish("once", lambda draft: made_in.append(draft))
    assert sources.publish("once", lambda draft: made_in.append(draft)) == first
    assert len(made_in) == 1


def test_a_make_that_fails_leaves_nothing(sources, cache):
    def fail(draft: Path) -> None:
        (draft / "half").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        sources.publish("failed", fail)
    assert not list(cache.glob("*failed*"))


def test_two_that_make_the_same_at_once_both_get_it(sources, cache):
    both_made = threading.Barrier(2)
    places = []

    def make(draft: Path) -> None:
        (draft / "file").write_text("same")
        both_made.wait(timeout=100)

    makers = [threading.Thread(target=lambda: places.append(sources.publish("race", make))) for _ in range(2)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert places == [cache / "race"] * 2
    assert (cache / "race" / "file").read_text() == "same"
    assert not list(cache.glob(".race*"))


def test_a_cache_that_cannot_be_written_names_the_cure(sources, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        sources.publish("anything", lambda draft: None)


@pytest.mark.parametrize("name", NAMES)
def test_a_path_that_is_not_there_is_refused_before_anything_runs(recipe, name, tmp_path):
    missing = tmp_path / "missing"
    module = recipe(name)
    with pytest.raises(ConfigError, match=f"there is no file or folder {missing}") as caught:
        module.build(module.Settings(data=str(missing)))
    assert caught.value.key == "recipe.data"


@pytest.mark.parametrize("name", NAMES)
def test_settings_refuse_another_size_and_stay_as_they_are(recipe, name):
    settings = recipe(name).Settings
    with pytest.raises(ConfigError, match="default and tiny") as caught:
        settings(size="huge")
    assert caught.value.key == "recipe.size"
    with pytest.raises(FrozenInstanceError):
        settings().size = "tiny"
    with pytest.raises(TypeError):
        settings("tiny")


@pytest.mark.parametrize("name", ["resnet50", "cifar10"])
def test_without_torchvision_the_cure_is_named(recipe, name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    module = recipe(name)
    with pytest.raises(ConfigError, match=r"pip install torchvision .*lightning-fastloop\[recipes\]"):
        module.build(module.Settings(size="tiny"))


@pytest.mark.parametrize("val", ["val", "test"])
def test_a_folder_with_a_split_keeps_it(sources, tmp_path, val):
    pictures(tmp_path, "train/cat/1.png", "train/dog/1.png", "train/dog/2.png", f"{val}/cat/1.png", f"{val}/dog/1.png")
    train, val_set = sources.picture_sets(tmp_path, None, None, outputs=2)
    assert (len(train), len(val_set)) == (3, 2)


@pytest.mark.parametrize("top", ["", "train/", "photos/"])
def test_without_a_split_every_tenth_picture_is_kept_back(sources, tmp_path, top):
    pictures(tmp_path, *(f"{top}{kind}/{number}.png" for kind in ("cat", "dog") for number in range(10)))
    train, val = sources.picture_sets(tmp_path, None, None, outputs=2)
    assert (len(train), len(val)) == (18, 2)
    assert list(val.indices) == [0, 10]
    assert not set(train.indices) & set(val.indices)


@pytest.mark.parametrize("files", [(), ("1.png",), ("cat/notes.txt",), ("cat/1.png", "dog/1.png")])
def test_a_folder_without_pictures_in_classes_says_what_was_looked_for(sources, tmp_path, files):
    with pytest.raises(ConfigError) as caught:
        sources.picture_sets(pictures(tmp_path, *files), None, None, outputs=2)
    assert caught.value.key == "recipe.data"
    assert "looked in" in caught.value.why or "too few" in caught.value.why


def test_more_classes_than_outputs_are_refused(sources, tmp_path):
    pictures(tmp_path, "train/cat/1.png", "train/dog/1.png", "val/cat/1.png", "val/dog/1.png")
    with pytest.raises(ConfigError, match="it has 2 classes, but the recipe's network has 1 outputs"):
        sources.picture_sets(tmp_path, None, None, outputs=1)


def tar_of(path: Path, *members: str) -> Path:
    with tarfile.open(path, "w") as tar:
        for member in members:
            entry = tarfile.TarInfo(member)
            entry.size = len(PNG)
            tar.addfile(entry, io.BytesIO(PNG))
    return path


def test_a_tar_is_unpacked_once_and_again_when_it_changes(sources, tmp_path):
    tar = tar_of(tmp_path / "photos.tar", "photos/cat/1.png")
    first = sources.picture_folder(str(tar), "unused", None)
    assert (first / "photos/cat/1.png").read_bytes() == PNG
    assert sources.picture_folder(str(tar), "unused", None) == first
    tar_of(tar, "photos/cat/1.png", "photos/dog/1.png")
    assert sources.picture_folder(str(tar), "unused", None) != first


def test_a_tar_that_reaches_outside_is_refused(sources, tmp_path, cache):
    tar = tar_of(tmp_path / "evil.tar", "photos/cat/1.png", "../../outside.png")
    with pytest.raises(ConfigError, match="outside"):
        sources.picture_folder(str(tar), "unused", None)
    assert not list(cache.glob("*evil*"))
    assert not list(cache.parent.rglob("outside.png"))


def test_a_tar_without_pictures_and_a_file_that_is_no_tar_are_refused(sources, tmp_path, cache):
    with pytest.raises(ConfigError, match="the tar contains no pictures"):
        sources.picture_folder(str(tar_of(tmp_path / "words.tar", "words.txt")), "unused", None)
    (tmp_path / "plain.tar").write_text("not a tar")
    with pytest.raises(ConfigError, match="cannot be unpacked as a tar"):
        sources.picture_folder(str(tmp_path / "plain.tar"), "unused", None)
    assert not list(cache.glob("*words*")) + list(cache.glob("*plain*"))


SPEED = (
    *("num_workers", "pin_memory", "prefetch", "persistent_workers", "non_blocking"),
    *("compile", "channels_last", "fused", "autocast", "bfloat16", "benchmark"),
    *("scaled_dot_product_attention", "set_float32_matmul_precision"),
)


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*.py")), ids=lambda file: file.stem)
def test_a_recipe_holds_no_speed_code(file):
    source = file.read_text(encoding="utf-8")
    assert [word for word in SPEED if word in source] == []
    assert len(source.splitlines()) <= (130 if file.stem in NAMES else 300)


@pytest.mark.parametrize(("name", "accumulate"), [("cifar10", 1), ("gpt2", 8), ("resnet50", 4)])
def test_a_recipes_yaml_is_the_naive_baseline(recipe, name, accumulate):
    config = yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))
    assert set(config) == {"recipe", "run", "trainer"}  # every rung is off
    assert config["trainer"] == {"accumulate_grad_batches": accumulate, "enable_checkpointing": False}
    assert recipe(name).Settings(**config["recipe"]) == recipe(name).Settings()
