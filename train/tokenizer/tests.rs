use super::*;
use crate::scratch::Scratch;

const TEXTS: [&[u8]; 7] = [
    b"",
    b"a\r\nb",
    &[0x92],
    "It's 12 o'clock — déjà vu 🦀🦀\t\u{a0} ".as_bytes(),
    b"broken \xf0\x9f\x92 here \xff\xfe\x00",
    b"<|endoftext|> </s> in a text",
    "日本語のテキスト、ไทย, العربية".as_bytes(),
];

fn round_trip(tokenizer: &Tokenizer) {
    for text in TEXTS {
        let ids = tokenizer.encode(text).unwrap();
        assert_eq!(tokenizer.decode(&ids).unwrap(), text, "{tokenizer:?}");
        assert!(ids.iter().all(|&id| Some(id) != tokenizer.end()), "{tokenizer:?}: an end in a text");
        let mut decoder = tokenizer.decoder();
        let pieces: String = ids.iter().map(|&id| decoder.push(id.into()).unwrap()).collect();
        assert_eq!(pieces + &decoder.flush(), String::from_utf8_lossy(text), "{tokenizer:?}");
        let (mut again, mut starts) = (Vec::new(), Vec::new());
        tokenizer.encoder().encode_placed(text, &mut again, &mut starts).unwrap();
        assert_eq!((&again, starts.len()), (&ids, ids.len()));
        for (n, &id) in ids.iter().enumerate() {
            assert!(text[starts[n]..].starts_with(&tokenizer.token(id).unwrap()), "{tokenizer:?}: start of token {n}");
        }
    }
    let beyond = tokenizer.vocab() as u32;
    let e = tokenizer.decode(&[0, beyond]).unwrap_err().to_string();
    assert!(e.contains("token 1") && e.contains(&beyond.to_string()), "{e}");
    assert!(tokenizer.decoder().push(-1).is_err() && tokenizer.decoder().push(beyond.into()).is_err());
}

#[test]
fn case_41_bytes_come_back() {
    let (bytes, ended) = (Tokenizer::bytes(), Tokenizer::bytes_with_end());
    round_trip(&bytes);
    round_trip(&ended);
    assert_eq!((bytes.vocab(), bytes.end(), ended.vocab(), ended.end()), (256, None, 257, Some(256)));
    assert_eq!(ended.decode(&[65, 256, 66]).unwrap(), b"AB");
    assert_ne!(bytes, ended);
    let missing = Tokenizer::open("nowhere.json", None).unwrap_err().to_string();
    assert!(missing.contains("nowhere.json"), "{missing}");
    assert!(Tokenizer::open("byte", Some("</s>")).is_err());
    let folder = Scratch::new();
    let none = Tokenizer::open(folder.path().to_str().unwrap(), None).unwrap_err().to_string();
    assert!(none.contains("tokenizer.json") && none.contains("vocab.bpe"), "{none}");
}

#[cfg(feature = "bpe")]
#[test]
fn case_41_gpt2_gives_any_bytes_back_and_no_half_characters() {
    let gpt2 = Tokenizer::gpt2().unwrap();
    round_trip(&gpt2);
    let ids = gpt2.encode("🦀".as_bytes()).unwrap();
    assert!(ids.len() > 1, "the point of this test: one character, several tokens");
    let mut decoder = gpt2.decoder();
    let pieces: Vec<String> = ids.iter().map(|&id| decoder.push(id.into()).unwrap()).collect();
    assert!(pieces[..ids.len() - 1].iter().all(String::is_empty) && pieces[ids.len() - 1] == "🦀", "{pieces:?}");
}

#[cfg(not(feature = "bpe"))]
#[test]
fn what_was_left_out_is_named() {
    let folder = Scratch::new();
    let file = folder.file("tokenizer.json", "{}");
    for name in ["gpt2", file.to_str().unwrap()] {
        let e = Tokenizer::open(name, None).unwrap_err().to_string();
        assert!(e.contains(name) && e.contains("built without"), "{e}");
    }
}

#[cfg(feature = "hugging-face")]
mod with_the_library {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn write(folder: &Scratch, name: &str, file: &serde_json::Value) -> String {
        folder.file(name, file.to_string()).to_str().unwrap().to_owned()
    }

    fn gpt2_file() -> serde_json::Value {
        files::to_json(&files::gpt2().unwrap())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]
        /// Our words and merges against those of the library, on any text.
        #[test]
        fn gpt2_ids_are_those_of_the_library(text in "(\\PC|[ \\t\\r\\n'a-z0-9]|'(s|ll|re)|[\u{a0}\u{3000}\u{300}²Ⅻ]| {2,3}){0,60}") {
            static LIBRARY: std::sync::OnceLock<Tokenizer> = std::sync::OnceLock::new();
            let library = LIBRARY.get_or_init(|| {
                let file = gpt2_file();
                by_library("gpt2", file.to_string().into_bytes(), &file).unwrap()
            });
            let text = text.as_bytes();
            prop_assert_eq!(Tokenizer::gpt2().unwrap().encode(text).unwrap(), library.encode(text).unwrap());
        }
    }

    #[test]
    fn case_41_a_byte_level_file_of_another_kind() {
        let folder = Scratch::new();
        let mut file = gpt2_file();
        // GPT-4's way to cut, which our own engine does not know.
        file["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},
             "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]});
        let tokenizer = Tokenizer::open(&write(&folder, "other.json", &file), None).unwrap();
        assert!(tokenizer.name().starts_with("other@") && tokenizer.is_byte_level() && tokenizer.cuts_cleanly());
        assert_eq!((tokenizer.vocab(), tokenizer.end()), (50_257, Some(50_256)));
        round_trip(&tokenizer);
        let digits = tokenizer.encode(b"1234567").unwrap();
        assert_ne!(digits, Tokenizer::gpt2().unwrap().encode(b"1234567").unwrap());
        let named = Tokenizer::open(&folder.path().join("other.json").to_string_lossy(), Some("Ġthe")).unwrap();
        assert_eq!(named.end(), Some(262));
        // It is kept in a folder, and told from others.
        let kept = folder.file("kept/tokenizer.json", tokenizer.file().unwrap());
        let back = Tokenizer::load(tokenizer.name(), tokenizer.end(), kept.parent().unwrap()).unwrap();
        assert_eq!((&back, back.encode(b"1234567").unwrap()), (&tokenizer, digits));
        let e = Tokenizer::load("other@00000000", None, kept.parent().unwrap()).unwrap_err().to_string();
        assert!(e.contains("other@00000000") && e.contains("contents"), "{e}");
    }

    #[test]
    fn a_file_that_is_not_byte_level() {
        let folder = Scratch::new();
        let file = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": {"type": "Lowercase"},
            "added_tokens": [{"id": 0, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
                              "normalized": false, "special": true}],
            "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
            "post_processor": null, "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
            "model": {"type": "WordLevel", "unk_token": "?", "vocab": {"</s>": 0, "▁to": 1, "▁be": 2, "▁or": 3, "?": 4}}});
        let tokenizer = Tokenizer::open(&write(&folder, "words.json", &file), None).unwrap();
        let ids = tokenizer.encode(b"To be or to").unwrap();
        assert_eq!((ids.as_slice(), tokenizer.end()), (&[1, 2, 3, 1][..], Some(0)));
        assert!(!tokenizer.is_byte_level() && !tokenizer.cuts_cleanly() && tokenizer.token(1).is_none());
        let mut decoder = tokenizer.decoder();
        let pieces: Vec<String> = [1, 2, 0, 3].iter().map(|&id| decoder.push(id).unwrap()).collect();
        assert_eq!((pieces.concat() + &decoder.flush()).as_str(), "to be or", "{pieces:?}");
        let e = tokenizer.encode(b"to \xff").unwrap_err().to_string();
        assert!(e.contains("0xff at 3"), "{e}");
        let mut endless = file.clone();
        endless["added_tokens"] = json!([]);
        endless["model"]["vocab"] = json!({"▁to": 0, "?": 1});
        let e = Tokenizer::open(&write(&folder, "endless.json", &endless), None).unwrap_err().to_string();
        assert!(e.contains("--end-token"), "{e}");
        let e = Tokenizer::open(&write(&folder, "endless.json", &endless), Some("<x>")).unwrap_err().to_string();
        assert!(e.contains("no token `<x>`"), "{e}");
    }

    #[test]
    fn a_vocabulary_is_learned() {
        let text = "the theme of the thesis is there, the other themes are 🦀🦀 elsewhere\n".repeat(50);
        let learn = |vocab| Tokenizer::train(vocab, std::iter::repeat_n(text.clone(), 3));
        let tokenizer = learn(280).unwrap();
        assert_eq!((tokenizer.vocab(), tokenizer.end()), (280, Some(0)));
        round_trip(&tokenizer);
        assert!(tokenizer.encode(b" the themes").unwrap().len() <= 3);
        assert_eq!(learn(280).unwrap().name(), tokenizer.name(), "the same texts give the same vocabulary");
        let folder = Scratch::new();
        let path = folder.file("t.json", tokenizer.file().unwrap());
        let back = Tokenizer::open(path.to_str().unwrap(), None).unwrap();
        assert!(matches!(back.engine, Engine::Bpe(_)) && back.file() == tokenizer.file());
        // The library reads what we wrote, and agrees.
        let library = by_library("t", back.file().unwrap(), &json!({"decoder": {"type": "ByteLevel"}})).unwrap();
        for text in TEXTS {
            assert_eq!(library.encode(text).unwrap(), tokenizer.encode(text).unwrap());
        }
        assert!(learn(256).unwrap_err().to_string().contains("at least 257"));
        let few = learn(5000).unwrap_err().to_string();
        assert!(few.contains("5000 were asked for"), "{few}");
    }

    #[test]
    fn broken_files() {
        let folder = Scratch::new();
        for (text, what) in [
            ("{", "expected a tokenizer.json"),
            ("[]", "no `model`"),
            ("{\"model\": {\"type\": \"X\"}}", "cannot be used"),
        ] {
            let path = folder.file("bad.json", text);
            let e = Tokenizer::open(path.to_str().unwrap(), None).unwrap_err().to_string();
            assert!(e.contains("bad.json") && e.contains(what), "{e}");
        }
    }
}
