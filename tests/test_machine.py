"""Who shares memory with whom."""

from __future__ import annotations

from pathlib import Path

from streamrl.machine import machine_identity, process_space


def test_a_machine_is_a_boot_of_the_kernel_and_a_file_system(tmp_path: Path) -> None:
    assert machine_identity() == machine_identity()
    other = machine_identity(shared_memory=tmp_path)
    assert other != machine_identity()
    boot = tmp_path / "boot_id"
    boot.write_text("another\n")
    assert machine_identity(boot=boot) != machine_identity()


def test_a_process_space_is_a_boot_of_the_kernel_and_a_namespace(tmp_path: Path) -> None:
    assert process_space() == process_space() != ""
    namespace, boot = tmp_path / "pid", tmp_path / "boot_id"
    namespace.symlink_to("pid:[1]")
    boot.write_text("another\n")
    assert len({process_space(), process_space(namespace=namespace), process_space(boot=boot)}) == 3
    assert process_space(namespace=tmp_path / "missing") == ""
