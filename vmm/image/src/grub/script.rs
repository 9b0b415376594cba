//! Syntax of GRUB scripts (GRUB manual, "Writing full configuration files directly").

use std::rc::Rc;

use thiserror::Error;

/// Maximum nesting of blocks.
const MAX_NESTING: usize = 32;

/// Error of parsing a script.
#[derive(Debug, Error, PartialEq, Eq)]
pub(crate) enum SyntaxError {
    #[error("line {0}: a quote is not closed")]
    Quote(usize),
    #[error("line {0}: `{1}` is not expected here")]
    Unexpected(usize, String),
    #[error("line {0}: the file ends inside a block")]
    End(usize),
    #[error("line {0}: blocks are nested deeper than {MAX_NESTING}")]
    Nesting(usize),
}

/// A part of a word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Segment {
    /// Text as it stands; quoted text makes a word even when it is empty.
    Text { text: String, quoted: bool },
    /// A variable; unquoted, its value is split at blanks.
    Variable { name: String, quoted: bool },
}

/// A word before expansion.
pub(crate) type Word = Vec<Segment>;
/// Commands in order.
pub(crate) type Block = Rc<[Command]>;

/// A command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    /// A name with arguments, and the braces that menuentry and submenu have.
    Simple { words: Vec<Word>, block: Option<Block> },
    /// if, elif …, else: conditions and their commands.
    If {
        branches: Vec<(Block, Block)>,
        otherwise: Block,
    },
    /// for NAME in WORDS.
    For {
        name: String,
        words: Vec<Word>,
        body: Block,
    },
    /// while or until. Never run: no boot configuration needs them.
    Loop,
    /// function NAME { … }
    Function { name: String, body: Block },
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    Word(Word),
    Separator,
    Open,
    Close,
}

/// Parses a script.
pub(crate) fn parse(text: &str) -> Result<Block, SyntaxError> {
    let mut parser = Parser {
        tokens: tokens(text)?,
        at: 0,
        depth: 0,
    };
    let (block, end) = parser.block(&[])?;
    match end {
        BlockEnd::EndOfFile => Ok(block),
        BlockEnd::Brace | BlockEnd::Keyword(_) => Err(parser.unexpected("}")),
    }
}

/// Parses a word in which only variables are special.
pub(crate) fn variables(text: &str) -> Word {
    let mut word = Word::new();
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '$' => variable(&mut word, &mut chars, false),
            c => push_text(&mut word, c, false),
        }
    }
    word
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

fn tokens(text: &str) -> Result<Vec<(Token, usize)>, SyntaxError> {
    let mut out = Vec::new();
    let mut line = 1;
    let mut chars = text.chars().peekable();
    let mut word: Word = Vec::new();
    // The line a word starts on, for the messages.
    let finish = |word: &mut Word, out: &mut Vec<(Token, usize)>, line| {
        if word.is_empty() {
            return;
        }
        let token = match bare(word) {
            Some("{") => Token::Open,
            Some("}") => Token::Close,
            _ => Token::Word(std::mem::take(word)),
        };
        word.clear();
        out.push((token, line));
    };
    while let Some(c) = chars.next() {
        match c {
            '\n' | ';' => {
                finish(&mut word, &mut out, line);
                out.push((Token::Separator, line));
                line += usize::from(c == '\n');
            }
            ' ' | '\t' | '\r' => finish(&mut word, &mut out, line),
            '#' if word.is_empty() => while chars.next_if(|c| *c != '\n').is_some() {},
            '\\' => match chars.next() {
                Some('\n') => line += 1,
                Some(c) => push_text(&mut word, c, true),
                None => {}
            },
            '\'' => {
                let start = line;
                open_quote(&mut word);
                loop {
                    match chars.next().ok_or(SyntaxError::Quote(start))? {
                        '\'' => break,
                        c => {
                            line += usize::from(c == '\n');
                            push_text(&mut word, c, true);
                        }
                    }
                }
            }
            '"' => {
                let start = line;
                open_quote(&mut word);
                loop {
                    let c = chars.next().ok_or(SyntaxError::Quote(start))?;
                    line += usize::from(c == '\n');
                    match c {
                        '"' => break,
                        '\\' => match chars.next_if(|c| matches!(c, '$' | '"' | '\\' | '\n')) {
                            Some('\n') => line += 1,
                            Some(c) => push_text(&mut word, c, true),
                            None => push_text(&mut word, '\\', true),
                        },
                        '$' => variable(&mut word, &mut chars, true),
                        c => push_text(&mut word, c, true),
                    }
                }
            }
            '$' if chars.peek() == Some(&'"') => {}
            '$' => variable(&mut word, &mut chars, false),
            c => push_text(&mut word, c, false),
        }
    }
    finish(&mut word, &mut out, line);
    out.push((Token::Separator, line));
    Ok(out)
}

/// A quote makes a word, even if nothing follows in it.
fn open_quote(word: &mut Word) {
    word.push(Segment::Text {
        text: String::new(),
        quoted: true,
    });
}

fn push_text(word: &mut Word, c: char, quote: bool) {
    match word.last_mut() {
        Some(Segment::Text { text, quoted }) if *quoted == quote => text.push(c),
        _ => word.push(Segment::Text {
            text: c.to_string(),
            quoted: quote,
        }),
    }
}

fn variable(word: &mut Word, chars: &mut std::iter::Peekable<std::str::Chars<'_>>, quoted: bool) {
    let mut name = String::new();
    if chars.next_if_eq(&'{').is_some() {
        while let Some(c) = chars.next_if(|c| *c != '}' && *c != '\n') {
            name.push(c);
        }
        chars.next_if_eq(&'}');
    } else if let Some(c) = chars.next_if(|c| matches!(c, '?' | '#' | '*' | '@')) {
        name.push(c);
    } else {
        while let Some(c) = chars.next_if(|c| is_name(*c)) {
            name.push(c);
        }
    }
    match name.is_empty() {
        true => push_text(word, '$', quoted),
        false => word.push(Segment::Variable { name, quoted }),
    }
}

/// The text of a word that is one piece of unquoted text: keywords and braces must be.
fn bare(word: &Word) -> Option<&str> {
    match word.as_slice() {
        [Segment::Text { text, quoted: false }] => Some(text),
        _ => None,
    }
}

/// Terminator of a block.
enum BlockEnd {
    EndOfFile,
    Brace,
    Keyword(String),
}

struct Parser {
    tokens: Vec<(Token, usize)>,
    at: usize,
    depth: usize,
}

impl Parser {
    fn line(&self) -> usize {
        self.tokens
            .get(self.at)
            .or(self.tokens.last())
            .map_or(1, |(_, line)| *line)
    }

    fn unexpected(&self, what: &str) -> SyntaxError {
        SyntaxError::Unexpected(self.line(), what.to_owned())
    }

    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at).map(|(token, _)| token)
    }

    fn next(&mut self) -> Option<Token> {
        let token = self.peek().cloned();
        self.at += 1;
        token
    }

    fn skip_separators(&mut self) {
        while self.peek() == Some(&Token::Separator) {
            self.at += 1;
        }
    }

    /// Commands up to a closing brace, one of the words in `until`, or the end of the script.
    fn block(&mut self, until: &[&str]) -> Result<(Block, BlockEnd), SyntaxError> {
        self.depth += 1;
        if self.depth > MAX_NESTING {
            return Err(SyntaxError::Nesting(self.line()));
        }
        let mut commands = Vec::new();
        let end = loop {
            self.skip_separators();
            match self.peek() {
                None => break BlockEnd::EndOfFile,
                Some(Token::Close) => {
                    self.at += 1;
                    break BlockEnd::Brace;
                }
                Some(Token::Word(word)) => {
                    if let Some(keyword) = bare(word).filter(|w| until.contains(w)) {
                        let keyword = keyword.to_owned();
                        self.at += 1;
                        break BlockEnd::Keyword(keyword);
                    }
                    commands.push(self.command()?);
                }
                Some(Token::Open) => return Err(self.unexpected("{")),
                // Skipped above.
                Some(Token::Separator) => {}
            }
        };
        self.depth -= 1;
        Ok((commands.into(), end))
    }

    /// Commands up to one of the words in `until`, which must come.
    fn until(&mut self, until: &[&str]) -> Result<(Block, String), SyntaxError> {
        match self.block(until)? {
            (block, BlockEnd::Keyword(word)) => Ok((block, word)),
            (_, BlockEnd::Brace) => Err(self.unexpected("}")),
            (_, BlockEnd::EndOfFile) => Err(SyntaxError::End(self.line())),
        }
    }

    fn braces(&mut self) -> Result<Block, SyntaxError> {
        match self.block(&[])? {
            (block, BlockEnd::Brace) => Ok(block),
            _ => Err(SyntaxError::End(self.line())),
        }
    }

    fn command(&mut self) -> Result<Command, SyntaxError> {
        let keyword = match self.peek() {
            Some(Token::Word(word)) => bare(word).unwrap_or_default().to_owned(),
            _ => String::new(),
        };
        match keyword.as_str() {
            "if" => {
                self.at += 1;
                self.conditional()
            }
            "for" => {
                self.at += 1;
                let words = self.words();
                let name = words.first().and_then(bare).map(str::to_owned);
                let name = name.ok_or_else(|| self.unexpected("for"))?;
                let words = words.into_iter().skip(2).collect();
                self.expect_do()?;
                let (body, _) = self.until(&["done"])?;
                Ok(Command::For { name, words, body })
            }
            "while" | "until" => {
                self.at += 1;
                self.until(&["do"])?;
                self.until(&["done"])?;
                Ok(Command::Loop)
            }
            "function" => {
                self.at += 1;
                let words = self.words();
                let name = words.first().and_then(bare).map(str::to_owned);
                let name = name.ok_or_else(|| self.unexpected("function"))?;
                self.skip_separators();
                match self.next() {
                    Some(Token::Open) => Ok(Command::Function {
                        name,
                        body: self.braces()?,
                    }),
                    _ => Err(self.unexpected("function")),
                }
            }
            "then" | "elif" | "else" | "fi" | "do" | "done" => Err(self.unexpected(&keyword)),
            _ => {
                let words = self.words();
                let block = if self.peek() == Some(&Token::Open) {
                    self.at += 1;
                    Some(self.braces()?)
                } else {
                    None
                };
                Ok(Command::Simple { words, block })
            }
        }
    }

    fn expect_do(&mut self) -> Result<(), SyntaxError> {
        self.skip_separators();
        match self.next() {
            Some(Token::Word(word)) if bare(&word) == Some("do") => Ok(()),
            _ => Err(self.unexpected("for")),
        }
    }

    fn conditional(&mut self) -> Result<Command, SyntaxError> {
        let mut branches = Vec::new();
        loop {
            let (condition, _) = self.until(&["then"])?;
            let (body, end) = self.until(&["elif", "else", "fi"])?;
            branches.push((condition, body));
            match end.as_str() {
                "elif" => {}
                "else" => {
                    let (otherwise, _) = self.until(&["fi"])?;
                    return Ok(Command::If { branches, otherwise });
                }
                _ => {
                    return Ok(Command::If {
                        branches,
                        otherwise: Rc::new([]),
                    });
                }
            }
        }
    }

    /// Words up to a separator or brace.
    fn words(&mut self) -> Vec<Word> {
        let mut words = Vec::new();
        while let Some(Token::Word(_)) = self.peek() {
            if let Some(Token::Word(word)) = self.next() {
                words.push(word);
            }
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn simple(text: &str) -> Vec<Word> {
        match &parse(text).unwrap()[..] {
            [Command::Simple { words, .. }] => words.clone(),
            other => panic!("{other:?}"),
        }
    }

    fn text(text: &str, quoted: bool) -> Segment {
        Segment::Text {
            text: text.to_owned(),
            quoted,
        }
    }

    #[test]
    fn quotes_variables_and_continuations() {
        let var = |name: &str, quoted| Segment::Variable {
            name: name.to_owned(),
            quoted,
        };
        assert_eq!(
            simple("linux 'a b'\"$c d\\\"\" \\\n ${e}f$1 \"\" # not this"),
            vec![
                vec![text("linux", false)],
                vec![
                    text("a b", true),
                    text("", true),
                    var("c", true),
                    text(" d\"", true)
                ],
                vec![var("e", false), text("f", false), var("1", false)],
                vec![text("", true)],
            ]
        );
        assert_eq!(simple("a $ b\\ c")[1], vec![text("$", false)]);
        assert_eq!(
            simple("a b\\ c")[1],
            vec![text("b", false), text(" ", true), text("c", false)]
        );
    }

    #[test]
    fn blocks_nest() {
        let script = "function f {\n x\n}\nmenuentry 'a' --class b {\n if [ 1 ]; then\n y\n elif z; then w; else v; fi }\nfor i in 1 2; do q $i; done";
        let block = parse(script).unwrap();
        assert!(matches!(&block[0], Command::Function { name, body } if name == "f" && body.len() == 1));
        let Command::Simple {
            words,
            block: Some(inner),
        } = &block[1]
        else {
            panic!()
        };
        assert_eq!(words.len(), 4);
        let Command::If { branches, otherwise } = &inner[0] else {
            panic!()
        };
        assert_eq!((branches.len(), otherwise.len()), (2, 1));
        assert!(matches!(&block[2], Command::For { words, .. } if words.len() == 2));
    }

    #[test]
    fn damage_is_named_by_line() {
        assert_eq!(parse("a\nmenuentry x {\n"), Err(SyntaxError::End(3)));
        assert_eq!(parse("a\n}\n"), Err(SyntaxError::Unexpected(2, "}".into())));
        assert_eq!(parse("a\n'b\n"), Err(SyntaxError::Quote(2)));
        assert_eq!(parse("fi"), Err(SyntaxError::Unexpected(1, "fi".into())));
        let deep = "menuentry x {\n".repeat(100_000);
        assert!(matches!(parse(&deep), Err(SyntaxError::Nesting(_))));
        let deep = "if ".repeat(100_000);
        assert!(matches!(parse(&deep), Err(SyntaxError::Nesting(_))));
    }
}
