//! The runner, with cases that do what cases must not. A program of its own, as the runner starts itself for each case.

use anyhow::{Result, bail, ensure};
use husk_tests::harness::Case;
use husk_tests::harness::context::{Skip, TestContext, expect_contains};
use husk_tests::harness::runner::{self, Selection};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

const CASES: &[Case] = &[
    case("passes", |ctx| {
        ctx.part("good", || Ok(()));
        Ok(())
    }),
    case("fails", |ctx| {
        std::fs::write(ctx.log("words.log"), "last words\n")?;
        bail!("the reason\nand its detail")
    }),
    case("part", |ctx| {
        ctx.part("bad", || bail!("of no use"));
        Ok(())
    }),
    case("skips", |_| Err(Skip("not here".to_owned()).into())),
    case("panics", |_| panic!("for a test")),
    case("hangs", |_| {
        Command::new("sh")
            .args(["-c", "setsid sleep 3600 & sleep 3601"])
            .status()?;
        Ok(())
    }),
    case("leaves-a-process", |_| {
        let script = "setsid sleep 3602 < /dev/null > /dev/null 2>&1 &";
        Command::new("sh").args(["-c", script]).status()?;
        Ok(())
    }),
    case("leaves-a-file", |ctx| {
        std::fs::create_dir_all(ctx.runtime_dir().join("default/vm"))?;
        Ok(())
    }),
];

const fn case(name: &'static str, run: fn(&TestContext) -> Result<()>) -> Case {
    Case {
        name,
        about: "",
        limit: Duration::from_secs(2),
        run,
    }
}

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["--run-case", name, folder] => {
            let passed = TestContext::at(PathBuf::from(folder))?.run_case(CASES, name)?;
            std::process::exit(i32::from(!passed));
        }
        ["suite", filters @ ..] => {
            let filters = filters.iter().map(|&filter| filter.to_owned()).collect();
            let passed = runner::run(
                CASES,
                &Selection {
                    filters,
                    exact: false,
                    keep: false,
                    which: None,
                },
            )?;
            std::process::exit(i32::from(!passed));
        }
        _ => check(),
    }
}

fn suite(filters: &[&str]) -> Result<(bool, String)> {
    let mut command = Command::new(std::env::current_exe()?);
    let output = command
        .arg("suite")
        .args(filters)
        .stderr(Stdio::null())
        .output()?;
    Ok((output.status.success(), String::from_utf8(output.stdout)?))
}

fn check() -> Result<()> {
    let (passed, text) = suite(&["passes", "skips"])?;
    ensure!(passed, "{text}");
    expect_contains(
        &text,
        &["ok passes/good ", "ok passes ", "skipped skips: not here\n"],
    )?;
    ensure!(text.ends_with("\ne2e: 2 passed, 0 failed, 1 skipped\n"), "{text}");

    let (passed, text) = suite(&[])?;
    ensure!(!passed, "{text}");
    expect_contains(
        &text,
        &[
            "FAILED fails: the reason (",
            "    and its detail\n",
            "    -- the end of words.log:\n    last words\n",
            "FAILED part/bad: of no use\n",
            "FAILED part: 1 parts failed (",
            "FAILED panics: its process ended: exit status: 101 (",
            "FAILED hangs: still running after 2 s (",
            "FAILED leaves-a-process: left behind: (",
            ": sleep 3602\n",
            "FAILED leaves-a-file: left behind: (",
            "/run/default\n",
        ],
    )?;
    ensure!(text.ends_with("\ne2e: 2 passed, 7 failed, 1 skipped\n"), "{text}");

    // All that the cases had started is gone.
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let words = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        ensure!(
            !words.starts_with(b"sleep\x00360"),
            "still runs: {}",
            entry.path().display()
        );
    }
    let left = suite(&["nothing-of-that-name"])?;
    ensure!(
        left.1 == "e2e: 0 passed, 0 failed, 0 skipped\n" && !left.0,
        "{left:?}"
    );
    Ok(())
}
