//! Output on stdout.

use std::io::{self, ErrorKind, IsTerminal, Write};

use crate::failure::Failure;

/// Writes `text` to stdout. A closed pipe (`husk list | head -1`) is not an error.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    write(text.as_bytes()).map(drop)
}

/// Writes `bytes` to stdout; false if the pipe is closed.
pub(crate) fn write(bytes: &[u8]) -> Result<bool, Failure> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::at("write to stdout")(error)),
    }
}

/// `value` as indented JSON with a newline at the end.
pub(crate) fn json(value: &impl serde::Serialize) -> Result<String, Failure> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

/// Formats a number of bytes as a Kubernetes quantity, in the largest unit that gives a whole number.
pub(crate) fn bytes(bytes: u64) -> String {
    let units = [
        (1_u64 << 40, "Ti"),
        (1 << 30, "Gi"),
        (1 << 20, "Mi"),
        (1 << 10, "Ki"),
    ];
    match units
        .iter()
        .find(|(size, _)| bytes >= *size && bytes.is_multiple_of(*size))
    {
        Some((size, unit)) => format!("{}{unit}", bytes / size),
        None => bytes.to_string(),
    }
}

/// True if stdout is a terminal and NO_COLOR is not set (<https://no-color.org>).
pub(crate) fn colour() -> bool {
    io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Formats an age like kubectl: two units for a short one, else one.
pub(crate) fn age(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match () {
        () if seconds < 120 => format!("{seconds}s"),
        () if minutes < 10 => format!("{minutes}m{}s", seconds % 60),
        () if minutes < 180 => format!("{minutes}m"),
        () if hours < 8 => format!("{hours}h{}m", minutes % 60),
        () if hours < 48 => format!("{hours}h"),
        () if days < 8 => format!("{days}d{}h", hours % 24),
        () => format!("{days}d"),
    }
}

/// Formats rows as left-aligned columns, two spaces apart.
pub(crate) fn table(rows: &[impl AsRef<[String]>]) -> String {
    let mut widths = Vec::new();
    for row in rows {
        widths.resize(widths.len().max(row.as_ref().len()), 0);
        for (width, cell) in widths.iter_mut().zip(row.as_ref()) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (width, cell) in widths.iter().zip(row.as_ref()) {
            line.push_str(&format!("{cell:width$}  "));
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_quantities() {
        for (count, text) in [
            (0, "0"),
            (1000, "1000"),
            (1 << 30, "1Gi"),
            (1536 << 20, "1536Mi"),
            (4097, "4097"),
        ] {
            assert_eq!(bytes(count), text);
        }
    }

    #[test]
    fn ages_look_like_kubectls() {
        for (seconds, text) in [
            (0, "0s"),
            (119, "119s"),
            (120, "2m0s"),
            (605, "10m"),
            (10_800, "3h0m"),
            (30_000, "8h"),
            (200_000, "2d7h"),
            (800_000, "9d"),
        ] {
            assert_eq!(age(seconds), text);
        }
    }

    #[test]
    fn columns_line_up_without_trailing_space() {
        let row = |cells: [&str; 3]| cells.map(String::from);
        let text = table(&[row(["NAME", "STATE", "UP"]), row(["a-long-name", "Running", ""])]);
        assert_eq!(text, "NAME         STATE    UP\na-long-name  Running\n");
    }
}
