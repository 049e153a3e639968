//! How GPT-2's files write bytes: each as one printable letter, so that tokens are words of a text file.

use std::sync::OnceLock;

/// The letter of every byte: itself where it is printable, one from U+0100 on where it is not.
fn letters() -> &'static [char; 256] {
    static LETTERS: OnceLock<[char; 256]> = OnceLock::new();
    LETTERS.get_or_init(|| {
        let mut next = 0x100..;
        std::array::from_fn(|byte| match byte as u8 {
            b @ (b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) => char::from(b),
            _ => next.next().and_then(char::from_u32).unwrap_or_default(),
        })
    })
}

/// `bytes` as letters.
pub(crate) fn from_bytes(bytes: &[u8]) -> String {
    bytes.iter().map(|&byte| letters()[usize::from(byte)]).collect()
}

/// The bytes that `text` stands for; `None` if one of its letters stands for none.
pub(crate) fn to_bytes(text: &str) -> Option<Box<[u8]>> {
    let byte = |c: char| match u32::from(c) {
        code @ 0..0x100 => (letters()[code as usize] == c).then_some(code as u8),
        code => letters().iter().position(|&l| u32::from(l) == code).map(|b| b as u8),
    };
    text.chars().map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_letter() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(to_bytes(&from_bytes(&all)).unwrap()[..], all);
        assert_eq!(from_bytes(b" the\n"), "ĠtheĊ");
        assert_eq!((to_bytes(" "), to_bytes("ü").map(|b| b[0])), (None, Some(0xfc)));
    }
}
