//! Holds the table of the pass file in ARCHITECTURE.md against the one that the code is made from.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use meshwork::protocol::pass::layout::{FIELDS, Writer};

#[test]
fn the_table_of_the_pass_file_is_the_one_in_the_code() {
    let text = include_str!("../ARCHITECTURE.md");
    let table = text.split("| record | field | offset |").nth(1).expect("the table is there");
    let written: Vec<&str> = table.lines().skip(2).take_while(|line| !line.is_empty()).collect();
    let row = |field: &meshwork::protocol::pass::layout::Field| {
        let writer = match field.writer {
            Writer::Creator => "creator",
            Writer::Worker => "worker",
            Writer::Client => "client",
            Writer::Owner => "owner",
            Writer::Anyone => "anyone",
        };
        let (record, name, when) = (field.record, field.name, field.when);
        format!("| {record} | `{name}` | {} | {} | {writer} | {when} |", field.offset, field.bytes)
    };
    let expected: Vec<String> = FIELDS.iter().map(row).collect();
    assert_eq!(written, expected);
}
