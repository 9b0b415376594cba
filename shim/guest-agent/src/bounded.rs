//! Bounds on what one reply may hold once it is parsed: many small values take more memory than their text.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, SeqAccess, Visitor};

use crate::visible::cut;

/// Longest text, in bytes: a path of Linux. What is longer is cut.
pub(crate) const MAX_TEXT: usize = 4096;

/// Most elements of a reply that is a list. Further ones are dropped.
pub(crate) const MAX_ELEMENTS: usize = 1024;

struct Text(String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;
        impl Visitor<'_> for TextVisitor {
            type Value = Text;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Text, E> {
                Ok(Text(cut(text, MAX_TEXT).to_owned()))
            }
        }
        deserializer.deserialize_str(TextVisitor)
    }
}

/// A string of at most [`MAX_TEXT`] bytes.
pub(crate) fn text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Text::deserialize(deserializer).map(|text| text.0)
}

/// As [`text`], of a member that may be null.
pub(crate) fn optional_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    Ok(Option::<Text>::deserialize(deserializer)?.map(|text| text.0))
}

/// A list inside of an element, of at most `LIMIT` elements.
pub(crate) fn inner_list<'de, D, T, const LIMIT: usize>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    deserializer.deserialize_seq(ListVisitor::<T, LIMIT>(PhantomData))
}

/// A list of at most [`MAX_ELEMENTS`] elements.
pub(crate) fn list<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    inner_list::<D, T, MAX_ELEMENTS>(deserializer)
}

/// Strings of an element, bounded in number and length.
pub(crate) fn texts<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let texts: Vec<Text> = list(deserializer)?;
    Ok(texts.into_iter().map(|text| text.0).collect())
}

/// A reply that is a list of at most [`MAX_ELEMENTS`] elements.
pub(crate) struct List<T>(pub(crate) Vec<T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for List<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        list(deserializer).map(List)
    }
}

struct ListVisitor<T, const LIMIT: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const LIMIT: usize> Visitor<'de> for ListVisitor<T, LIMIT> {
    type Value = Vec<T>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Vec<T>, A::Error> {
        let mut list = Vec::new();
        while list.len() < LIMIT {
            match elements.next_element()? {
                Some(element) => list.push(element),
                None => return Ok(list),
            }
        }
        while elements.next_element::<IgnoredAny>()?.is_some() {}
        Ok(list)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn further_elements_and_longer_texts_are_dropped() {
        let numbers = serde_json::to_string(&vec![7; MAX_ELEMENTS + 5]).unwrap();
        let list: List<u8> = serde_json::from_str(&numbers).unwrap();
        assert_eq!(list.0.len(), MAX_ELEMENTS);
        let long = serde_json::to_string(&"é".repeat(MAX_TEXT)).unwrap();
        let text: Text = serde_json::from_str(&long).unwrap();
        assert_eq!(text.0.len(), MAX_TEXT);
    }

    #[test]
    fn a_fault_after_the_last_kept_element_is_still_one() {
        let mut numbers = serde_json::to_string(&vec![7; MAX_ELEMENTS + 5]).unwrap();
        numbers.pop();
        assert!(serde_json::from_str::<List<u8>>(&numbers).is_err());
    }
}
