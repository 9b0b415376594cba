//! Tables on a terminal.

use comfy_table::{CellAlignment, Table, presets};

/// Space between two columns.
const GAP: u16 = 2;

/// Rows of cells, padded to the width of their column: the first `left` columns left-aligned, the others right-aligned.
pub fn align(rows: &[Vec<String>], left: usize) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).add_rows(rows);
    for (place, column) in table.column_iter_mut().enumerate() {
        column.set_padding((if place == 0 { 0 } else { GAP }, 0));
        column.set_cell_alignment(if place < left {
            CellAlignment::Left
        } else {
            CellAlignment::Right
        });
    }
    table.trim_fmt()
}

/// A table with a head and a column of labels; nothing if there are no rows.
pub fn headed(head: Vec<String>, rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut all = vec![head];
    all.extend(rows);
    if all.len() > 1 {
        align(&all, 1)
    } else {
        String::new()
    }
}

/// The parts of a report that are not empty, with a blank line between two.
pub fn join(parts: impl IntoIterator<Item = String>) -> String {
    let parts: Vec<_> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    parts.join("\n\n")
}

/// The word for a target that is met or not.
pub fn verdict(is_met: bool) -> &'static str {
    if is_met { "ok" } else { "MISSED" }
}

/// Formats a value with its significant digits only.
pub fn number(value: f64) -> String {
    if value.abs() >= 10.0 {
        let digits = format!("{value:.0}");
        let mut out = String::new();
        for (place, digit) in digits.chars().enumerate() {
            if place > 0 && digits.len() > 4 && (digits.len() - place) % 3 == 0 {
                out.push(',');
            }
            out.push(digit);
        }
        out
    } else {
        format!("{value:.2}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let rows = [vec!["a".into(), "→ x".into()], vec!["bcd".into(), "12345".into()]];
        assert_eq!(align(&rows, 1), "a      → x\nbcd  12345");
        assert_eq!(align(&rows, 2), "a    → x\nbcd  12345");
    }

    #[test]
    fn numbers_are_short() {
        let cases = [
            (0.8412, "0.84"),
            (42.4, "42"),
            (3012.0, "3012"),
            (23_900.2, "23,900"),
            (1e6, "1,000,000"),
        ];
        for (value, text) in cases {
            assert_eq!(number(value), text);
        }
    }
}
