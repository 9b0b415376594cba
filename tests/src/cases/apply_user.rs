//! A VM that an ordinary user has applied, under the user's systemd.

use crate::harness::context::{TestContext, expect_contains};
use crate::harness::guest::Shell;
use crate::harness::program::Session;
use crate::harness::registry::{self, sh};
use crate::harness::{Case, TIMEOUT, until};
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "apply-user",
    about: "husk apply of an ordinary user: systemd --user runs the VM, and starts it again with the user's manager",
    limit: Duration::from_secs(480),
    run,
};

const USER: &str = "husk-user";

/// The user, whose files and units are removed in the end.
struct User<'s> {
    ctx: &'s TestContext,
    id: String,
}

impl<'s> User<'s> {
    /// Makes a user with a systemd manager that runs without a session.
    fn make(ctx: &'s TestContext) -> Result<User<'s>> {
        sh(ctx, &format!("useradd --create-home --groups kvm {USER}"))?;
        let id = sh(ctx, &format!("id -u {USER}"))?.trim().to_owned();
        let user = User { ctx, id };
        let id = &user.id;
        // The lab has no pam_systemd, which sets the variable elsewhere.
        sh(
            ctx,
            &format!(
                "mkdir -p /run/systemd/system/user@{id}.service.d
                 printf '[Service]\\nPAMName=\\nEnvironment=XDG_RUNTIME_DIR=/run/user/%%i\\n' \\
                     > /run/systemd/system/user@{id}.service.d/lab.conf
                 systemctl daemon-reload
                 loginctl enable-linger {USER}
                 systemctl start user@{id}.service"
            ),
        )?;
        Ok(user)
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("runuser");
        let home = format!("/home/{USER}");
        command
            .args(["-u", USER, "--", "env", "-u", "HUSK_DATA_DIR"])
            .arg(format!("HOME={home}"))
            .arg(format!("USER={USER}"))
            .arg(format!("XDG_RUNTIME_DIR=/run/user/{}", self.id))
            .arg(format!("REGISTRY_AUTH_FILE={home}/auth.json"))
            .arg(format!("PATH={}", path()))
            .args(words)
            .current_dir(home);
        command
    }

    fn run(&self, words: &[&str]) -> Result<String> {
        self.ctx.finish(self.command(words), TIMEOUT)?.ok()
    }

    fn is_running(&self) -> Result<bool> {
        let shown = self.run(&["husk", "get", "vm", "mine", "-o", "json"])?;
        Ok(shown.contains("\"printableStatus\": \"Running\""))
    }
}

impl Drop for User<'_> {
    fn drop(&mut self) {
        let id = &self.id;
        let _ = sh(
            self.ctx,
            &format!(
                "loginctl disable-linger {USER}; systemctl stop user@{id}.service user-runtime-dir@{id}.service
                 rm -r /run/systemd/system/user@{id}.service.d; systemctl daemon-reload
                 userdel --remove {USER} || true"
            ),
        );
    }
}

/// The search path, with the folder of this program, which has `husk`.
fn path() -> String {
    let own = std::env::current_exe().ok();
    let folder = own.as_deref().and_then(std::path::Path::parent);
    let folder = folder
        .map(|folder| folder.display().to_string())
        .unwrap_or_default();
    format!("{folder}:/usr/bin:/usr/sbin:/bin")
}

fn run(ctx: &TestContext) -> Result<()> {
    ctx.needs_root()?;
    let registry = registry::start(ctx)?;
    registry::fill(ctx)?;
    let user = User::make(ctx)?;
    let home = format!("/home/{USER}");
    let trusted = format!("{home}/.config/containers/certs.d/{}", registry::ADDRESS);
    let vm = json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": "mine"},
        "spec": {
            "running": true,
            "template": {"spec": {
                "domain": {
                    "memory": {"guest": "128Mi"},
                    "devices": {"disks": [{"name": "data", "disk": {"bus": "virtio"}}]},
                    "firmware": registry::firmware("disks,button,shell"),
                },
                "volumes": [{"name": "data", "dataVolume": {"name": "mine-data"}}],
            }},
            "dataVolumeTemplates": [{
                "metadata": {"name": "mine-data"},
                "spec": {"source": {"blank": {}}, "storage": {"resources": {"requests": {"storage": "8Mi"}}}},
            }],
        },
    });
    std::fs::write(ctx.path("mine.yaml"), vm.to_string())?;
    std::fs::set_permissions(ctx.path("auth.json"), std::fs::Permissions::from_mode(0o644))?;
    sh(
        ctx,
        &format!(
            "mkdir -p {trusted}; cp tls.crt {trusted}/ca.crt; cp auth.json mine.yaml {home}
             chown -R {USER}: {home}"
        ),
    )?;
    ctx.part("life", || life(ctx, &user));
    drop(registry);
    Ok(())
}

fn life(ctx: &TestContext, user: &User<'_>) -> Result<()> {
    let applied = user.run(&["husk", "apply", "-f", "mine.yaml"])?;
    expect_contains(
        &applied,
        &["virtualmachine.kubevirt.io/mine created", "mine: running"],
    )?;
    ensure!(!applied.contains("enable-linger"), "the user lingers: {applied}");
    let console = Session::on_terminal(
        user.command(&["husk", "console", "mine"]),
        &ctx.log("mine.console.log"),
    )?;
    let shell = Shell::small_on(&console)?;
    shell.ok("echo kept | dd of=/dev/vda conv=fsync status=none")?;
    drop(console);
    // Root's store does not have it.
    ctx.run(&["get", "vm", "--all-namespaces"])?
        .says(&["No resources found"])?;

    // As at the end and the begin of a boot: the guest is shut down, and the VM runs again.
    let monitor = user.run(&["husk", "inspect", "mine", "-o", "json"])?;
    sh(ctx, &format!("systemctl restart user@{}.service", user.id))?;
    until(|| user.is_running()).context("it does not run with the user's new manager")?;
    ensure!(
        user.run(&["husk", "inspect", "mine", "-o", "json"])? != monitor,
        "it was not restarted"
    );
    let console = Session::on_terminal(
        user.command(&["husk", "console", "mine"]),
        &ctx.log("mine.console.log"),
    )?;
    Shell::small_on(&console)?.expect_contains("head -n 1 /dev/vda", &["kept"])?;
    drop(console);
    user.run(&["husk", "delete", "-f", "mine.yaml"])?;
    let left = user.run(&["husk", "get", "pvc"])?;
    expect_contains(&left, &["No resources found"])
}
