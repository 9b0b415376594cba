//! A block of lines between two marker lines, which can be found and removed again.

use std::ops::Range;

pub(super) const BEGIN: &str =
    "# Added by `husk node install`; `husk node uninstall` removes everything between these lines.";
pub(super) const END: &str = "# End of the lines added by `husk node install`.";

/// Marker lines that earlier versions of `husk node install` wrote.
const OLD_BEGIN: &str =
    "# Made by `husk node install`; `husk node uninstall` removes all between these lines.";
const OLD_END: &str = "# End of what `husk node install` made.";

/// Appends `lines` to the text. The result ends with a newline if the text does or is empty.
pub(super) fn add(text: &str, lines: &str) -> String {
    if text.is_empty() || text.ends_with('\n') {
        format!("{text}{lines}\n")
    } else {
        format!("{text}\n{lines}")
    }
}

/// Removes lines that [`add`] appended.
pub(super) fn cut(text: &str, lines: Range<usize>) -> String {
    let (before, after) = (&text[..lines.start], &text[lines.end..]);
    match text[lines].ends_with('\n') {
        true => format!("{before}{after}"),
        false => before.strip_suffix('\n').unwrap_or(before).to_owned(),
    }
}

/// Byte range of the block, markers included.
pub(super) fn find(text: &str) -> Result<Option<Range<usize>>, String> {
    let mut begin = None;
    let mut at = 0;
    for (number, line) in text.split_inclusive('\n').enumerate() {
        match line.trim() {
            // A second begin marker: the first block has no end.
            BEGIN | OLD_BEGIN if begin.is_some() => break,
            BEGIN | OLD_BEGIN => begin = Some((number + 1, at)),
            END | OLD_END => {
                if let Some((_, begin)) = begin {
                    return Ok(Some(begin..at + line.len()));
                }
            }
            _ => {}
        }
        at += line.len();
    }
    match begin {
        None => Ok(None),
        Some((number, _)) => Err(format!(
            "the block added by install begins at line {number} but has no end: insert `{END}` after its last line"
        )),
    }
}

/// Replaces the lines of the block by empty ones, which keeps the line numbers of all others.
pub(super) fn blank_out(text: &str) -> Result<String, String> {
    let Some(block) = find(text)? else {
        return Ok(text.to_owned());
    };
    let lines = "\n".repeat(text[block.clone()].matches('\n').count());
    Ok(format!("{}{lines}{}", &text[..block.start], &text[block.end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removing_restores_the_text() {
        for text in ["", "a", "a\n", "\n"] {
            let added = add(text, &format!("{BEGIN}\nb\n{END}"));
            let lines = find(&added).unwrap().unwrap();
            assert_eq!(added.ends_with('\n'), text.is_empty() || text.ends_with('\n'));
            assert_eq!(cut(&added, lines), text);
        }
        assert_eq!(find("a\n"), Ok(None));
        assert_eq!(find(&format!("{END}\n")), Ok(None));
    }

    #[test]
    fn markers_of_earlier_versions_are_recognised() {
        let text = format!("a\n{OLD_BEGIN}\nb\n{OLD_END}\nc\n");
        let lines = find(&text).unwrap().unwrap();
        assert_eq!(cut(&text, lines), "a\nc\n");
    }

    #[test]
    fn markers_may_be_indented() {
        let text = format!("a\r\n  {BEGIN}\r\nb\r\n  {END}\r\nc\n");
        let lines = find(&text).unwrap().unwrap();
        assert_eq!(cut(&text, lines), "a\r\nc\n");
        assert_eq!(blank_out(&text).unwrap(), "a\r\n\n\n\nc\n");
    }

    #[test]
    fn without_its_end_a_block_is_refused() {
        let why = find(&format!("a\n{BEGIN}\nb\n")).unwrap_err();
        assert!(
            why.starts_with("the block added by install begins at line 2 but has no end: "),
            "{why}"
        );
    }
}
