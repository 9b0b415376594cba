//! Tables on a terminal.

/// Rows of cells, padded to the width of their column: the first `left` columns left-aligned, the others right-aligned.
pub fn align(rows: &[Vec<String>], left: usize) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row
            .iter()
            .zip(&widths)
            .enumerate()
            .map(|(column, (cell, width))| {
                let gap = if column == 0 { "" } else { "  " };
                if column < left {
                    format!("{gap}{cell:<width$}")
                } else {
                    format!("{gap}{cell:>width$}")
                }
            });
        cells.collect::<String>().trim_end().to_owned()
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
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
