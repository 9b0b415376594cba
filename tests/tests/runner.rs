//! The runner, with cases that do what cases must not. A program of its own, as the runner starts itself for each case.

use anyhow::{Result, bail, ensure};
use husk_tests::harness::Case;
use husk_tests::harness::context::{Skip, TestContext, expect_contains};
use husk_tests::harness::runner::{self, Options};
use libtest_mimic::{Arguments, Trial};
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
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

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let passed = match words.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["--run-case", name, folder] => {
            TestContext::at(PathBuf::from(folder)).and_then(|ctx| ctx.run_case(CASES, name))
        }
        ["suite", arguments @ ..] => {
            let arguments = Arguments::from_iter([&["suite"], arguments].concat());
            runner::run(CASES, arguments, Options::default())
        }
        _ => return libtest_mimic::run(&Arguments::from_args(), tests()).exit_code(),
    };
    match passed {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The tests of this program.
fn tests() -> Vec<Trial> {
    vec![
        trial("passed_and_skipped_cases_are_counted", passes),
        trial("failures_are_counted_with_their_reasons", failures),
        trial("no_case_at_all_is_a_failure", nothing),
    ]
}

fn trial(name: &str, test: fn() -> Result<()>) -> Trial {
    Trial::test(name, move || test().map_err(|error| format!("{error:#}").into()))
}

/// Runs the suite of [`CASES`]: true if it succeeds, and its output.
fn suite(arguments: &[&str]) -> Result<(bool, String)> {
    let mut command = Command::new(std::env::current_exe()?);
    let output = command
        .arg("suite")
        .args(arguments)
        .stderr(Stdio::null())
        .output()?;
    Ok((output.status.success(), String::from_utf8(output.stdout)?))
}

fn passes() -> Result<()> {
    let (passed, text) = suite(&["passes"])?;
    ensure!(passed, "{text}");
    expect_contains(&text, &["ok passes/good ", "ok passes "])?;
    ensure!(text.ends_with("\ne2e: 2 passed, 0 failed, 0 skipped\n"), "{text}");
    let (passed, text) = suite(&["--exact", "skips"])?;
    ensure!(!passed, "{text}");
    expect_contains(&text, &["skipped skips: not here\n"])?;
    ensure!(text.ends_with("\ne2e: 0 passed, 0 failed, 1 skipped\n"), "{text}");
    Ok(())
}

fn failures() -> Result<()> {
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
    // The suite has ended every process that its cases started.
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let words = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        ensure!(
            !words.starts_with(b"sleep\x00360"),
            "still runs: {}",
            entry.path().display()
        );
    }
    Ok(())
}

fn nothing() -> Result<()> {
    let (passed, text) = suite(&["nothing-of-that-name"])?;
    ensure!(!passed, "{text}");
    ensure!(text.ends_with("\ne2e: 0 passed, 0 failed, 0 skipped\n"), "{text}");
    Ok(())
}
