//! Text on stdout, and where colour is wanted.

use std::io::{self, ErrorKind, IsTerminal, Write};

use crate::failure::Failure;

/// Writes `text` to stdout. A reader that has gone away (`husk list | head -1`) is no failure.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Failure::at("write to stdout")(error)),
        _ => Ok(()),
    }
}

/// Colour is for terminals whose user did not object (<https://no-color.org>).
pub(crate) fn colour() -> bool {
    io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Lays rows out in columns two spaces apart, the first row being the head.
pub(crate) fn table<const N: usize>(rows: &[[String; N]]) -> String {
    let mut widths = [0; N];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (width, cell) in widths.iter().zip(row) {
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
    fn columns_line_up_without_trailing_space() {
        let row = |cells: [&str; 3]| cells.map(String::from);
        let text = table(&[row(["NAME", "STATE", "UP"]), row(["a-long-name", "Running", ""])]);
        assert_eq!(text, "NAME         STATE    UP\na-long-name  Running\n");
    }
}
