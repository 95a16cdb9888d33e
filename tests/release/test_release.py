"""A release is whole: files have digests, manifests name the images that were built, the plugin runs."""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from kvplace import __version__
from release.__main__ import main
from tests.docs.blocks import block
from tests.node_programs.archives import read_archive
from tests.release.conftest import REGISTRY, URL

# The first test waits for the release to be made.
pytestmark = pytest.mark.timeout(1200)

PROJECT = Path(__file__).resolve().parents[2]


def test_every_file_has_its_digest_and_the_list_of_them_is_signed(
    released: Path, signing_key: Path, tmp_path: Path
) -> None:
    subprocess.run(["sha256sum", "--check", "--quiet", "--strict", "SHA256SUMS"], cwd=released, check=True)
    listed = {line.split("  ")[1] for line in (released / "SHA256SUMS").read_text().splitlines()}
    # No folders in it: a release is published as a list of files.
    files = {path.name for path in released.iterdir() if path.is_file()}
    assert listed == files - {"SHA256SUMS", "SHA256SUMS.sig"}
    assert not [path for path in released.iterdir() if path.is_dir()]

    for path in released.iterdir():
        (tmp_path / path.name).symlink_to(path)
    public = tmp_path / "release.pub"
    subprocess.run(["openssl", "ec", "-in", signing_key, "-pubout", "-out", public], check=True)
    check = ["sh", "-ec", block("docs/releasing.md", "openssl dgst -sha256 -verify")]
    subprocess.run(check, cwd=tmp_path, check=True)
    (tmp_path / "SHA256SUMS").unlink()
    (tmp_path / "SHA256SUMS").write_text("another list\n")
    assert subprocess.run(check, cwd=tmp_path, check=False).returncode != 0


def test_the_wheel_and_the_source_archive_are_those_of_this_version(released: Path) -> None:
    with zipfile.ZipFile(released / f"kvplace-{__version__}-py3-none-any.whl") as wheel:
        assert "kvplace/cli/main.py" in wheel.namelist()
    with tarfile.open(released / f"kvplace-{__version__}.tar.gz") as source:
        assert f"kvplace-{__version__}/make" in source.getnames()


@pytest.mark.parametrize("name", ["serve", "hook", "agent"])
def test_the_manifests_name_each_image_by_the_digest_of_its_archive(released: Path, name: str) -> None:
    image = read_archive(released / f"kvplace-{name}-{__version__}.oci.tar")
    assert image.reference == f"{REGISTRY}/{name}:{__version__}"
    assert image.config["created"].endswith("Z")
    assert image.config["config"]["Labels"]["org.opencontainers.image.version"] == __version__
    with tarfile.open(released / f"kvplace-manifests-{__version__}.tar.gz") as manifests:
        texts = [
            content.read().decode() for member in manifests if (content := manifests.extractfile(member))
        ]
    assert any(image.digest in text for text in texts)
    assert not [
        text for text in texts if re.search(rf"kvplace/{name}:\d|name: kvplace/{name}\n +newTag", text)
    ]


@pytest.mark.parametrize("name", ["serve", "hook", "agent"])
def test_the_software_list_names_the_packages_of_the_image(released: Path, name: str) -> None:
    image = read_archive(released / f"kvplace-{name}-{__version__}.oci.tar")
    document = json.loads((released / f"kvplace-{name}-{__version__}.cdx.json").read_text())
    assert document["bomFormat"] == "CycloneDX"
    (digest,) = document["metadata"]["component"]["hashes"]
    assert f"sha256:{digest['content']}" == image.digest
    found = {component["purl"].partition("@")[0] for component in document["components"]}
    assert {"pkg:generic/python", "pkg:pypi/msgspec" if name != "hook" else "pkg:pypi/h2"} <= found
    assert ("pkg:pypi/cyclonedx-python-lib" in found) is False
    pins = (PROJECT / "constraints.txt").read_text()
    for component in document["components"]:
        if component["purl"].startswith("pkg:pypi/") and component["name"] != "kvplace":
            pin = f"{component['name']}=={component['version']} ".replace("_", "-").lower()
            assert pin in pins.replace("_", "-").lower(), component
    if Path("/var/lib/dpkg/status").exists():
        assert "pkg:deb/debian/libc6" in found


@pytest.fixture(scope="session")
def plugin(released: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the plugin as krew does: the files of its manifest, and a link to the program."""
    manifest = yaml.safe_load((released / "kvplace.krew.yaml").read_text())
    assert (manifest["kind"], manifest["spec"]["version"]) == ("Plugin", f"v{__version__}")
    (platform,) = manifest["spec"]["platforms"]
    address, _, name = platform["uri"].rpartition("/")
    assert address == URL
    archive = released / name
    (digest,) = re.findall(rf"^(\w+)  {archive.name}$", (released / "SHA256SUMS").read_text(), re.MULTILINE)
    assert platform["sha256"] == digest
    folder = tmp_path_factory.mktemp("krew")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    assert platform["files"] == [{"from": "kvplace/*", "to": "."}]
    link = folder / "bin" / "kubectl-kvplace"
    link.parent.mkdir()
    link.symlink_to(folder / "kvplace" / platform["bin"])
    return link


def run_plugin(plugin: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run it with nothing of this environment."""
    return subprocess.run(
        [plugin, *arguments],
        env={"PATH": "/usr/bin:/bin"},
        cwd="/",
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_plugin_runs_with_an_interpreter_and_packages_of_its_own(plugin: Path) -> None:
    answered = run_plugin(plugin, "--version")
    assert (answered.stdout, answered.stderr) == (f"kvplace {__version__}\n", "")
    code = "import kubernetes, ssl, sys; print(kubernetes.__file__, sys.prefix)"
    home = plugin.resolve().parent
    start = (home / "start.py").read_text().replace("main()\n", f"{code}\n")
    (home / "probe.py").write_text(start)
    (interpreter,) = (home / "bin").iterdir()
    probe = subprocess.run(
        [interpreter, "-ISB", home / "probe.py"],
        env={"LD_LIBRARY_PATH": str(home / "libraries")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(word.startswith(str(home)) for word in probe.stdout.split())


def test_the_plugin_works_without_a_cluster_and_calls_itself_as_kubectl_does(plugin: Path) -> None:
    arguments = ("place", "--topology", "epyc-7502p", "-o", "json")
    answered = run_plugin(plugin, *arguments, stdin='{"vcpus": 4}\n')
    assert len(json.loads(answered.stdout)["placement"]["vcpus"]) == 4
    refused = run_plugin(plugin, "plaec")
    assert refused.returncode == 2
    assert "kubectl kvplace: " in refused.stderr or "kubectl kvplace --help" in refused.stderr
    assert "Traceback" not in answered.stderr + refused.stderr


def test_the_plugin_has_the_client_that_renews_an_oidc_token(plugin: Path, tmp_path: Path) -> None:
    settings = {"client-id": "me", "idp-issuer-url": "https://127.0.0.1:1", "refresh-token": "secret"}
    document = {
        "current-context": "here",
        "clusters": [{"name": "here", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "here", "user": {"auth-provider": {"name": "oidc", "config": settings}}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "here"}}],
    }
    (tmp_path / "config").write_text(json.dumps(document))
    answered = run_plugin(plugin, "get", "vms", "--kubeconfig", str(tmp_path / "config"))
    assert "https://127.0.0.1:1 does not renew its token: Cannot connect to host" in answered.stderr


def test_a_release_without_the_address_of_its_files_is_refused_before_anything_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--folder", str(tmp_path / "dist")])
    assert ended.value.code == 2
    assert "--url is required" in capsys.readouterr().err
    assert not (tmp_path / "dist").exists()


def test_another_version_than_that_of_the_checkout_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["99.0.0", "--url", URL]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"is version {__version__}, not 99.0.0: set __version__" in said.err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(None, "cannot be read"), (b"no key", "holds no private key in PEM")],
    ids=["missing", "text"],
)
def test_a_key_that_cannot_sign_is_refused_before_anything_is_built(
    content: bytes | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "release.key"
    if content is not None:
        key.write_bytes(content)
    assert main(["--url", URL, "--key", str(key), "--folder", str(tmp_path / "dist")]) == 1
    said = capsys.readouterr().err
    assert str(key) in said
    assert sentence in said
    assert "openssl ecparam" in said
    assert not (tmp_path / "dist").exists()
